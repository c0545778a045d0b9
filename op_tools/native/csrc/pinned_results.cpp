// Results of CPU kernels in pinned memory: a thread asks for it, and what PyTorch allocates there until it stops asking
// comes from the device's pinned allocator. Such a result is on its way to the device without being copied on the host,
// and its memory is used again without page faults. All other threads get what they always got.

#include <ATen/Context.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <string>
#include <unordered_map>

namespace {

constexpr size_t kSmall = 1 << 14;  // bytes that are not worth it

thread_local bool wanted = false;

struct NotNow {  // a pinned allocator may ask the one for the CPU
  NotNow() { wanted = false; }
  ~NotNow() { wanted = true; }
};

void release(void* address);

class Pinning final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (wanted && size > kSmall) {
      const NotNow until_the_end;
      try {
        c10::DataPtr data = pinned->allocate(size);
        void* address = data.get();
        if (address != nullptr) {
          const std::lock_guard<std::mutex> held(lock);
          given.emplace(address, std::move(data));
          return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
        }
      } catch (...) {  // no more of it: pageable memory does, too
      }
    }
    return usual->allocate(size);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t count) const override { usual->copy_data(to, from, count); }

  std::mutex lock;
  std::unordered_map<void*, c10::DataPtr> given;  // as the pinned allocator knows them
  c10::Allocator* usual = nullptr;
  c10::Allocator* pinned = nullptr;
  int users = 0;
};

Pinning& ours() {
  static Pinning* allocator = new Pinning;  // storages point to it as long as they live
  return *allocator;
}

void release(void* address) {
  c10::DataPtr data;  // given back after the lock
  {
    const std::lock_guard<std::mutex> held(ours().lock);
    const auto found = ours().given.find(address);
    if (found != ours().given.end()) {
      data = std::move(found->second);
      ours().given.erase(found);
    }
  }
  if (data.get() == nullptr) ours().usual->raw_deleter()(address);
}

}  // namespace

extern "C" {

// Returns 0 where there is no pinned memory for the device, or somebody else's allocator has to stay.
__attribute__((visibility("default"))) int op_tools_pinned_start(const char* device_type) {
  try {
    Pinning& allocator = ours();
    c10::Allocator* pinned = at::globalContext().getPinnedMemoryAllocator(c10::Device(std::string(device_type)).type());
    if (pinned == nullptr || (allocator.users > 0 && allocator.pinned != pinned)) return 0;
    c10::Allocator* present = c10::GetCPUAllocator();
    if (present != &allocator) {
      if (allocator.usual != nullptr && allocator.usual != present) return 0;
      if (present->raw_deleter() == nullptr) return 0;
      allocator.usual = present;
      c10::SetCPUAllocator(&allocator);
      if (c10::GetCPUAllocator() != &allocator) return 0;
    }
    allocator.pinned = pinned;
    ++allocator.users;
    return 1;
  } catch (...) {
    return 0;
  }
}

__attribute__((visibility("default"))) void op_tools_pinned_stop() {
  Pinning& allocator = ours();
  if (--allocator.users == 0 && c10::GetCPUAllocator() == &allocator) c10::SetCPUAllocator(allocator.usual);
}

__attribute__((visibility("default"))) void op_tools_pinned_want(int yes) { wanted = yes != 0; }

}  // extern "C"
