// Autocast: the operator lists that PyTorch uses for GPUs.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {
namespace {

Tensor binary_cross_entropy_banned(const Tensor& /*self*/, const Tensor& /*target*/,
                                   const std::optional<Tensor>& /*weight*/, int64_t /*reduction*/) {
  TORCH_CHECK(false,
              "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. "
              "Use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, or disable autocast around the call.");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SOFT_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(SOFT_LOWER_PRECISION)
#define SOFT_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(SOFT_FP32)
#define SOFT_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(SOFT_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define SOFT_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(SOFT_PROMOTE)
  m.impl(TORCH_SELECTIVE_NAME("aten::cat"), TORCH_FN((&WrapFunction<CastPolicy::promote, DeviceType::PrivateUse1,
                                                                    Tensor(const ITensorListRef&, int64_t),
                                                                    Tensor(const ITensorListRef&, int64_t),
                                                                    &ADD_NS(cat)>::type::call)));
  m.impl(TORCH_SELECTIVE_NAME("aten::stack"), TORCH_FN((&WrapFunction<CastPolicy::promote, DeviceType::PrivateUse1,
                                                                      Tensor(TensorList, int64_t),
                                                                      Tensor(TensorList, int64_t),
                                                                      &ADD_NS(stack)>::type::call)));
  m.impl(TORCH_SELECTIVE_NAME("aten::binary_cross_entropy"), TORCH_FN((&binary_cross_entropy_banned)));
}

} // namespace
} // namespace at::autocast
