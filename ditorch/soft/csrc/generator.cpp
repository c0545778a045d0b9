// Random number generators: one default per device, each drawing from a CPU
// generator of its own, so a seed gives the numbers that the CPU gives.
#include "soft.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>
#include <mutex>

namespace soft {
namespace {

struct SoftGenerator final : public c10::GeneratorImpl {
  SoftGenerator(c10::DeviceIndex device, at::Generator host)
      : c10::GeneratorImpl(c10::Device(kSoft, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t /*offset*/) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "soft generators have no offset; use get_state() and set_state()");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "soft generators have no offset; use get_state() and set_state()");
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  SoftGenerator* clone_impl() const override {
    return new SoftGenerator(device().index(), host.clone());
  }

  at::Generator host;
};

} // namespace

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<SoftGenerator>(checked_index(index), at::detail::createCPUGenerator());
}

static bool shared = false; // the devices draw from the CPU's own generator

void share_random() {
  shared = true;
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::array<std::once_flag, kMaxDevices> made;
  static std::array<at::Generator, kMaxDevices> generators;
  const auto device = checked_index(index);
  std::call_once(made[device], [&] {
    generators[device] =
        shared ? at::make_generator<SoftGenerator>(device, at::detail::getDefaultCPUGenerator()) : new_generator(device);
  });
  return generators[device];
}

at::Tensor advanced_state(const at::Tensor& state, int64_t numbers) {
  auto generator = at::detail::createCPUGenerator();
  auto* host = at::check_generator<at::CPUGeneratorImpl>(generator);
  host->set_state(*state.unsafeGetTensorImpl());
  for (int64_t i = 0; i < numbers; ++i) {
    host->random();
  }
  if (numbers > 0) { // the second half of a pair of normal numbers belongs to the place that was left
    host->set_next_float_normal_sample(std::nullopt);
    host->set_next_double_normal_sample(std::nullopt);
  }
  return at::Tensor(host->get_state());
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kSoft, "Expected a 'soft' device type for generator but found '",
              generator.device(), "'");
  return static_cast<SoftGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

} // namespace soft
