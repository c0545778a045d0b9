// The operators that a device must bring itself: memory, views, copies, and the
// few that choose their path by device type.
#include "soft.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/native_dropout_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <atomic>

namespace soft {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// Uninitialized memory gets known contents in deterministic mode, as on other devices.
at::Tensor filled_if_deterministic(at::Tensor tensor) {
  const auto& context = at::globalContext();
  if (C10_UNLIKELY(context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())) {
    at::native::fill_empty_deterministic_(tensor);
  }
  return tensor;
}

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(c10::kStrided) == c10::kStrided,
                              "soft: only strided tensors are supported, got layout ", *layout);
}

at::Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                               std::optional<bool> pin_memory, std::optional<at::MemoryFormat> memory_format) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(checked_device(device));
  return filled_if_deterministic(
      at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(dtype), memory_format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  const c10::DeviceGuard guard(checked_device(device));
  return filled_if_deterministic(
      at::detail::empty_strided_generic(size, stride, allocator(), kKeys, c10::dtype_or_default(dtype)));
}

// Zeros that own no memory, which forward-mode differentiation uses.
at::Tensor efficient_zeros(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                           std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                           std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  struct Nothing final : public c10::Allocator {
    c10::DataPtr allocate(size_t /*bytes*/) override {
      return {nullptr, c10::Device(kSoft, current_device())};
    }
    c10::DeleterFnPtr raw_deleter() const override {
      return nullptr;
    }
    void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*count*/) const final {}
  };
  static Nothing nothing;
  const c10::DeviceGuard guard(checked_device(device));
  return at::detail::empty_generic(size, &nothing, kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  const_cast<at::Tensor&>(target).copy_(self, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  at::native::resize_output(target, self.sizes());
  const_cast<at::Tensor&>(target).copy_(self);
  return target;
}

// The CPU's own kernels, which allocate on the current device: that must be the tensor's.
const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> memory_format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, memory_format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  const c10::DeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  const c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator(), /*resizable=*/true);
  return at::native::set_storage_cpu_(self, storage, 0, {0}, {});
}

// Lets `parameter.data = ...` go from one device to another, so that module.to() keeps its parameters: ties between
// them, and the optimizers that hold them.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto dense = [](const at::Tensor& tensor) {
    const auto keys = tensor.key_set();
    return (keys.has(c10::DispatchKey::CPU) || keys.has(c10::DispatchKey::PrivateUse1)) &&
        !keys.has(c10::DispatchKey::Python);
  };
  return (dense(self) && dense(from)) || self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

void record_stream(at::Tensor& /*self*/, c10::Stream /*stream*/) {} // work never outlives the call that issues it

std::atomic<bool (*)(const at::Tensor&)> g_is_distributed{nullptr};

// While it lives, the CPU may choose among all its kernels of attention, whatever sdpa_kernel() left.
class AllKernelsOfAttention {
 public:
  AllKernelsOfAttention()
      : flash_(at::globalContext().userEnabledFlashSDP()), math_(at::globalContext().userEnabledMathSDP()) {
    set(true, true);
  }
  ~AllKernelsOfAttention() {
    set(flash_, math_);
  }
  AllKernelsOfAttention(const AllKernelsOfAttention&) = delete;
  AllKernelsOfAttention& operator=(const AllKernelsOfAttention&) = delete;

 private:
  void set(bool flash, bool math) {
    auto& context = at::globalContext();
    if (!flash_ || !math_) { // otherwise there is nothing to change for others who read them
      context.setSDPUseFlash(flash);
      context.setSDPUseMath(math);
    }
  }
  bool flash_;
  bool math_;
};

// Attention takes the path that the CPU takes for the same tensors without a word from the program, wherever one of the
// kernels that the program allows would do it on CUDA. So the recomputation of a checkpoint, which runs in the backward
// pass and outside of sdpa_kernel(), takes the path of the forward pass and saves as many tensors.
int64_t sdp_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                   bool enable_gqa) {
  if (query.key_set().has(c10::DispatchKey::Python)) { // there is no memory to look at
    // A DTensor shards operators of attention; the steps of the math path would meet a plain mask.
    const auto is_distributed = g_is_distributed.load(std::memory_order_relaxed);
    const bool fused = is_distributed != nullptr && is_distributed(query);
    return static_cast<int64_t>(fused ? at::SDPBackend::efficient_attention : at::SDPBackend::math);
  }
  auto host = [](const at::Tensor& tensor) {
    return host_alias(tensor).requires_grad_(tensor.requires_grad());
  };
  std::optional<at::Tensor> host_mask;
  if (mask.has_value() && mask->defined()) {
    host_mask = host(*mask);
  }
  auto choose = [&] {
    return at::_fused_sdp_choice(host(query), host(key), host(value), host_mask, dropout, causal, scale, enable_gqa);
  };
  const auto& context = at::globalContext();
  const bool gradient_of_mask = host_mask.has_value() && host_mask->requires_grad();
  const bool easy_mask = !host_mask.has_value() || (dropout == 0.0 && !gradient_of_mask);
  const bool by_flash = context.userEnabledFlashSDP() && query.size(-1) == value.size(-1) && easy_mask;
  const bool by_cudnn = context.userEnabledCuDNNSDP() && !gradient_of_mask;
  if (context.userEnabledMemEfficientSDP() || by_flash || by_cudnn) {
    const AllKernelsOfAttention guard;
    return choose();
  }
  return choose();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zeros);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_empty);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  // Made of other operators on the CPU too; run here, it draws from the device's generator.
  m.impl("native_dropout", &at::native::native_dropout_cpu);
}

} // namespace

void set_is_distributed(bool (*question)(const at::Tensor&)) {
  g_is_distributed = question;
}

} // namespace soft

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &soft::sdp_choice)
} // namespace at::native
