// Device and pinned memory: host memory, counted per device.
//
// Nothing is cached, so "reserved" equals "allocated". The optional limit makes
// a device as small as the test needs.
#include "soft.h"

#include <c10/core/CPUAllocator.h>
#if SOFT_TORCH_AT_LEAST(2, 9)
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include <sys/sysinfo.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>

namespace soft {
namespace {

struct Counter {
  std::atomic<int64_t> current{0}, peak{0}, added{0}, removed{0};

  // False, and no change, if that would be more than `most` (0: no bound).
  bool add(int64_t amount, int64_t most = 0) {
    const auto value = current.fetch_add(amount, std::memory_order_relaxed) + amount;
    if (C10_UNLIKELY(most > 0 && value > most)) {
      current.fetch_sub(amount, std::memory_order_relaxed);
      return false;
    }
    added.fetch_add(amount, std::memory_order_relaxed);
    auto seen = peak.load(std::memory_order_relaxed);
    while (value > seen && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
    }
    return true;
  }
  void remove(int64_t amount) {
    current.fetch_sub(amount, std::memory_order_relaxed);
    removed.fetch_add(amount, std::memory_order_relaxed);
  }
};

struct Ledger {
  Counter bytes, blocks;
  std::atomic<int64_t> ooms{0}, limit{0}; // limit 0: the host's memory is the limit
};

std::array<Ledger, kMaxDevices>& g_ledger = *new std::array<Ledger, kMaxDevices>();

std::string readable(int64_t bytes) {
  char text[32];
  if (bytes >= (1LL << 30)) {
    snprintf(text, sizeof(text), "%.2f GiB", static_cast<double>(bytes) / (1LL << 30));
  } else if (bytes >= (1LL << 20)) {
    snprintf(text, sizeof(text), "%.2f MiB", static_cast<double>(bytes) / (1LL << 20));
  } else {
    snprintf(text, sizeof(text), "%lld bytes", static_cast<long long>(bytes));
  }
  return text;
}

// Bytes of a device, counted for as long as this lives.
struct Charge {
  Charge(int64_t bytes, c10::DeviceIndex device) : bytes(bytes), device(device) {
    auto& ledger = g_ledger[device];
    const auto limit = ledger.limit.load(std::memory_order_relaxed);
    if (C10_UNLIKELY(!ledger.bytes.add(bytes, limit))) {
      ++ledger.ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "soft out of memory. Tried to allocate ", readable(bytes),
                       ". Device soft:", static_cast<int>(device), " has a limit of ", readable(limit), ", of which ",
                       readable(ledger.bytes.current), " is in use. Free tensors, use a smaller batch, or raise the "
                       "limit (DITORCH_SOFT_MEMORY_LIMIT or torch.soft.set_memory_limit).");
    }
    ledger.blocks.add(1);
  }
  ~Charge() {
    g_ledger[device].bytes.remove(bytes);
    g_ledger[device].blocks.remove(1);
  }
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;

  const int64_t bytes;
  const c10::DeviceIndex device;
};

// Memory of a device: its own, or a CPU storage that became a result.
struct Block {
  Block(int64_t bytes, c10::DeviceIndex device) : charge(bytes, device) {}

  Charge charge;
  c10::Storage host;
  c10::DataPtr memory;
};

void release(void* context) {
  delete static_cast<Block*>(context);
}

c10::DataPtr handed_out(std::unique_ptr<Block> block, void* data) {
  const c10::Device device(kSoft, block->charge.device);
  return {data, block.release(), &release, device};
}

#if SOFT_TORCH_AT_LEAST(2, 9)
using AllocatorBase = c10::DeviceAllocator;
#else
using AllocatorBase = c10::Allocator;
#endif

struct DeviceMemory final : public AllocatorBase {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    if (bytes == 0) {
      return {nullptr, c10::Device(kSoft, device)};
    }
    auto& counted = g_ledger[device].bytes;
    const auto peak = counted.peak.load();
    auto block = std::make_unique<Block>(static_cast<int64_t>(bytes), device);
    try {
      block->memory = c10::GetCPUAllocator()->allocate(bytes);
    } catch (const c10::Error& error) {
      block.reset();
      counted.peak = std::max(peak, counted.current.load()); // what was not there is no peak
      rethrow_if_out_of_memory(error);
      throw;
    }
    void* data = block->memory.get();
    return handed_out(std::move(block), data);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // the context is a Block, never the data pointer itself
  }
  void copy_data(void* to, const void* from, std::size_t count) const final {
    default_copy_data(to, from, count);
  }

#if SOFT_TORCH_AT_LEAST(2, 9)
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& /*ptr*/, c10::Stream /*stream*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto from = memory_stats(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    auto fill = [&](c10::CachingAllocator::StatArray& array, int64_t current, int64_t peak, int64_t added,
                    int64_t removed) {
      array[all].current = current;
      array[all].peak = peak;
      array[all].allocated = added;
      array[all].freed = removed;
    };
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      fill(*bytes, from.allocated, from.peak, from.total_allocated, from.total_freed);
    }
    for (auto* count : {&stats.allocation, &stats.active, &stats.segment}) {
      fill(*count, from.blocks, from.peak_blocks, from.total_blocks, from.freed_blocks);
    }
    stats.num_ooms = from.ooms;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    reset_accumulated(device);
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    reset_peak(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) { // virtual since 2.10
    const auto [free, total] = memory_info(device);
    return {static_cast<size_t>(free), static_cast<size_t>(total)};
  }
#endif
};

// Never destroyed: tensors may outlive this library's static objects.
DeviceMemory& g_allocator = *new DeviceMemory();
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &g_allocator)

// Pinned memory is ordinary host memory that is known to be pinned.
std::shared_mutex& g_pinned_mutex = *new std::shared_mutex();
std::map<uintptr_t, size_t>& g_pinned = *new std::map<uintptr_t, size_t>(); // start -> bytes

struct PinnedBlock {
  c10::DataPtr memory;
};

void release_pinned(void* context) {
  auto* block = static_cast<PinnedBlock*>(context);
  {
    const std::unique_lock lock(g_pinned_mutex);
    g_pinned.erase(reinterpret_cast<uintptr_t>(block->memory.get()));
  }
  delete block;
}

struct PinnedMemory final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(bytes);
    void* data = memory.get();
    if (data == nullptr) {
      return memory;
    }
    {
      const std::unique_lock lock(g_pinned_mutex);
      g_pinned[reinterpret_cast<uintptr_t>(data)] = bytes;
    }
    return {data, new PinnedBlock{std::move(memory)}, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t count) const final {
    default_copy_data(to, from, count);
  }
};

PinnedMemory& g_pinned_allocator = *new PinnedMemory();

} // namespace

c10::Allocator* allocator() {
  return &g_allocator;
}

c10::DataPtr adopt(c10::Storage host, c10::DeviceIndex device) {
  const auto bytes = static_cast<int64_t>(host.nbytes());
  void* data = host.mutable_data();
  if (data == nullptr) {
    return {nullptr, c10::Device(kSoft, device)};
  }
  auto block = std::make_unique<Block>(bytes, device);
  block->host = std::move(host);
  return handed_out(std::move(block), data);
}

std::optional<c10::Storage> adopted(const c10::Storage& soft) {
  const auto& data = soft.data_ptr();
  if (data.get_deleter() != &release) {
    return std::nullopt;
  }
  const auto& host = static_cast<Block*>(data.get_context())->host;
  return host ? std::optional(host) : std::nullopt;
}

void rethrow_if_out_of_memory(const c10::Error& error) {
  const std::string message = error.what_without_backtrace();
  if (message.find("can't allocate memory") != std::string::npos) {
    ++g_ledger[current_device()].ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "soft out of memory: the host has no more to give (", message,
                     "). Free tensors or use a smaller batch.");
  }
}

MemoryStats memory_stats(c10::DeviceIndex index) {
  const auto& from = g_ledger[checked_index(index)];
  return {from.bytes.current, from.bytes.peak,  from.bytes.added,  from.bytes.removed, from.blocks.current,
          from.blocks.peak,   from.blocks.added, from.blocks.removed, from.ooms,          from.limit};
}

void reset_peak(c10::DeviceIndex index) {
  auto& ledger = g_ledger[checked_index(index)];
  ledger.bytes.peak = ledger.bytes.current.load();
  ledger.blocks.peak = ledger.blocks.current.load();
}

void reset_accumulated(c10::DeviceIndex index) {
  auto& ledger = g_ledger[checked_index(index)];
  ledger.bytes.added = ledger.bytes.removed = 0;
  ledger.blocks.added = ledger.blocks.removed = 0;
  ledger.ooms = 0;
}

void set_memory_limit(c10::DeviceIndex index, int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "soft: a memory limit must be 0 (none) or a number of bytes, got ", bytes);
  g_ledger[checked_index(index)].limit = bytes;
}

std::pair<int64_t, int64_t> memory_info(c10::DeviceIndex index) {
  const auto stats = memory_stats(index);
  if (stats.limit > 0) {
    return {std::max<int64_t>(stats.limit - stats.allocated, 0), stats.limit};
  }
  struct sysinfo host {};
  TORCH_CHECK(sysinfo(&host) == 0, "soft: the host's memory size could not be read");
  const auto unit = static_cast<int64_t>(host.mem_unit);
  return {(static_cast<int64_t>(host.freeram) + static_cast<int64_t>(host.bufferram)) * unit,
          static_cast<int64_t>(host.totalram) * unit};
}

c10::Allocator* pinned_allocator() {
  return &g_pinned_allocator;
}

bool is_pinned(const void* ptr) {
  const auto address = reinterpret_cast<uintptr_t>(ptr);
  const std::shared_lock lock(g_pinned_mutex);
  auto it = g_pinned.upper_bound(address);
  if (it == g_pinned.begin()) {
    return false;
  }
  --it;
  return address < it->first + it->second;
}

} // namespace soft
