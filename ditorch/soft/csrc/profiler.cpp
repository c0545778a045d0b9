// Device ranges for torch.profiler.
#include "soft.h"

#include <torch/csrc/profiler/stubs/base.h>

namespace soft {
namespace {

struct Stubs final : public torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex* device, torch::profiler::impl::ProfilerVoidEventStub* event,
              int64_t* cpu_ns) const override {
    if (device != nullptr) {
      *device = current_device();
    }
    const auto now = now_ns();
    *event = std::make_shared<int64_t>(now);
    if (cpu_ns != nullptr) {
      *cpu_ns = now;
    }
  }
  float elapsed(const torch::profiler::impl::ProfilerVoidEventStub* start,
                const torch::profiler::impl::ProfilerVoidEventStub* end) const override {
    const auto from = *std::static_pointer_cast<int64_t>(*start);
    const auto to = *std::static_pointer_cast<int64_t>(*end);
    return static_cast<float>(static_cast<double>(to - from) / 1e3); // microseconds
  }
  void mark(const char* /*name*/) const override {}
  void rangePush(const char* /*name*/) const override {}
  void rangePop() const override {}
  bool enabled() const override {
    return true;
  }
  void onEachDevice(std::function<void(int)> op) const override {
    const c10::DeviceGuard guard(c10::Device(kSoft, current_device()));
    for (int device = 0; device < device_count(); ++device) {
      set_device(static_cast<c10::DeviceIndex>(device));
      op(device);
    }
  }
  void synchronize() const override {}
};

} // namespace

void register_profiler() {
  static auto* stubs = new Stubs();
  torch::profiler::impl::registerPrivateUse1Methods(stubs);
}

} // namespace soft
