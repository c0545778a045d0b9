// Devices, streams, events and the hooks through which PyTorch asks for them.
//
// Work runs to completion inside the call that issues it, so every stream is
// always idle and ordering between streams holds by construction; events carry
// the time at which they were recorded.
#include "soft.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#if __has_include(<c10/core/DeviceCapability.h>)
#include <c10/core/DeviceCapability.h>
#define SOFT_HAS_DEVICE_CAPABILITY
#endif

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>

namespace soft {
namespace {

std::atomic<int> g_device_count{1};
std::array<std::atomic<int64_t>, kMaxDevices> g_next_stream{};
thread_local c10::DeviceIndex t_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> t_stream{};

struct Event {
  int64_t recorded_at = 0;
};

} // namespace

int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

c10::DeviceIndex device_count() noexcept {
  return static_cast<c10::DeviceIndex>(g_device_count.load(std::memory_order_relaxed));
}

void set_device_count(int64_t count) {
  TORCH_CHECK_VALUE(count >= 1 && count <= kMaxDevices, "soft: the number of devices must be 1 to ",
                    static_cast<int>(kMaxDevices), ", got ", count);
  g_device_count = static_cast<int>(count);
}

c10::DeviceIndex current_device() noexcept {
  return t_device;
}

c10::DeviceIndex checked_index(c10::DeviceIndex index) {
  if (index == -1) {
    return t_device;
  }
  TORCH_CHECK(index >= 0 && index < device_count(), "soft:", static_cast<int>(index),
              " does not exist: this process has ", static_cast<int>(device_count()),
              " soft device(s), soft:0 to soft:", static_cast<int>(device_count()) - 1,
              ". Set DITORCH_SOFT_DEVICES=", static_cast<int>(index) + 1, " before starting to have more.");
  return index;
}

c10::Device checked_device(std::optional<c10::Device> device) {
  if (!device.has_value()) {
    return {kSoft, t_device};
  }
  TORCH_CHECK(device->type() == kSoft, "soft: expected a soft device, got ", *device);
  return {kSoft, checked_index(device->index())};
}

void set_device(c10::DeviceIndex index) {
  t_device = checked_index(index);
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  const auto previous = t_device;
  set_device(index);
  return previous;
}

namespace {

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSoft;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kSoft, exchange_device(device.index())};
  }
  c10::Device getDevice() const override {
    return {kSoft, t_device};
  }
  void setDevice(c10::Device device) const override {
    set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) {
      t_device = device.index();
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
#ifdef SOFT_HAS_DEVICE_CAPABILITY
  c10::DeviceCapability getDeviceCapability(c10::Device device) const override {
    checked_index(device.index());
    c10::DeviceCapability capability; // every type, less the quantized ones
    auto& has = capability.capability_data.supported_scalar_types;
    has.has_QInt8 = has.has_QUInt8 = has.has_QInt32 = has.has_QUInt4x2 = has.has_QUInt2x4 = 0;
    return capability;
  }
#endif

  // noexcept, as releases before 2.7 demand: an index that does not exist means the current device.
  c10::Stream getStream(c10::Device device) const noexcept override {
    const auto index = existing(device.index());
    return stream(index, t_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(checked_index(device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    const auto index = checked_index(device.index());
    return stream(index, ++g_next_stream[index]);
  }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    const auto index = existing(next.device_index());
    const auto previous = t_stream[index];
    t_stream[index] = next.id();
    return stream(index, previous);
  }
  bool queryStream(const c10::Stream& /*stream*/) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    checked_index(index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& /*ptr*/, const c10::Stream& /*stream*/) const override {}

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    checked_index(stream.device_index());
    if (*event == nullptr) {
      *event = new Event();
    }
    static_cast<Event*>(*event)->recorded_at = now_ns();
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override {
    return true;
  }
  void synchronizeEvent(void* /*event*/) const override {}
  double elapsedTime(void* start, void* end, const c10::DeviceIndex /*device*/) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "soft: both events must be recorded before elapsed_time()");
    return static_cast<double>(static_cast<Event*>(end)->recorded_at - static_cast<Event*>(start)->recorded_at) / 1e6;
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }

 private:
  static c10::DeviceIndex existing(c10::DeviceIndex index) noexcept {
    return index >= 0 && index < device_count() ? index : t_device;
  }
  static c10::Stream stream(c10::DeviceIndex index, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSoft, index), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// No `override` below: PyTorch added and moved some of these between releases.
struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const {
    return true;
  }
  bool isAvailable() const {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const {
    return true;
  }
  void init() const {}
  c10::DeviceIndex deviceCount() const {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex index) const {
    set_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const {
    return exchange_device(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const {
    return index < 0 ? current_device() : exchange_device(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index = -1) const {
    return new_generator(index);
  }
  c10::Device getDeviceFromPtr(void* /*data*/) const {
    return {kSoft, current_device()}; // all of them share the host's memory
  }
  bool isPinnedPtr(const void* data) const {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(impl->device());
    auto fresh = allocator()->allocate(bytes);
    const auto keep = std::min(bytes, impl->nbytes());
    if (keep > 0) {
      std::memcpy(fresh.get(), impl->data(), keep);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

const bool g_hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace
} // namespace soft
