// Autocast: PyTorch's operator lists for GPUs, applied by boxed kernels.
//
// Boxed, because the templates that PyTorch offers for this take longer to compile than all other
// files here together.
#include "soft.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/ivalue.h>
#include <torch/library.h>

namespace soft {
namespace {

enum class Policy : uint8_t {
  lower_precision, // cast to the autocast dtype
  fp32, // cast to float32
  fp32_result, // low-precision input: ask for a float32 result
  widest, // cast to the widest type among the arguments
  refuse, // would overflow: tell the user
};

struct Cast {
  at::ScalarType to;
  at::Tensor operator()(const at::Tensor& tensor) const {
    return tensor.defined() ? at::autocast::cached_cast(to, tensor, kSoft) : tensor;
  }
};

template <class Visit>
void visit_tensors(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const auto& tensor : value.toTensorVector()) {
      visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      if (tensor.has_value()) {
        visit(*tensor);
      }
    }
  }
}

void cast_value(c10::IValue& value, const Cast& cast) {
  if (value.isTensor()) {
    value = cast(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) {
      tensor = cast(tensor);
    }
    value = c10::IValue(std::move(tensors));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(tensor.has_value() ? std::optional<at::Tensor>(cast(*tensor)) : std::nullopt);
    }
    value = c10::IValue(std::move(tensors));
  }
}

class AutocastKernel final : public c10::OperatorKernel {
 public:
  AutocastKernel(Policy policy, int dtype_arg) : policy_(policy), dtype_arg_(dtype_arg) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
    const auto count = op.schema().arguments().size();
    auto* args = stack->data() + (stack->size() - count);
    switch (policy_) {
      case Policy::refuse:
        TORCH_CHECK(false, op.schema().name(),
                    " is unsafe to autocast: use binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, or "
                    "disable autocast around the call.");
      case Policy::lower_precision:
        cast_all(args, count, at::autocast::get_autocast_dtype(kSoft));
        break;
      case Policy::fp32:
        cast_all(args, count, at::kFloat);
        break;
      case Policy::fp32_result:
        ask_for_fp32(args, count);
        break;
      case Policy::widest:
        cast_all(args, count, widest(args, count));
        break;
    }
    op.callBoxed(stack);
  }

 private:
  static void cast_all(c10::IValue* args, size_t count, at::ScalarType to) {
    for (size_t i = 0; i < count; ++i) {
      cast_value(args[i], Cast{to});
    }
  }
  static at::ScalarType widest(c10::IValue* args, size_t count) {
    auto type = at::autocast::get_autocast_dtype(kSoft);
    for (size_t i = 0; i < count; ++i) {
      visit_tensors(args[i], [&](const at::Tensor& tensor) {
        if (tensor.defined()) {
          type = at::autocast::prioritize(type, tensor, kSoft);
        }
      });
    }
    return type;
  }
  void ask_for_fp32(c10::IValue* args, size_t count) const {
    if (!args[0].isTensor() || !at::autocast::is_eligible(args[0].toTensor(), kSoft)) {
      return;
    }
    if (dtype_arg_ < 0) { // no dtype to ask with: a float32 input gives a float32 result
      cast_all(args, count, at::kFloat);
    } else if (args[dtype_arg_].isNone()) {
      args[dtype_arg_] = at::kFloat;
    }
  }

  Policy policy_;
  int dtype_arg_;
};

void add(torch::Library& library, const char* name, const char* overload, Policy policy) {
  const auto op = c10::Dispatcher::singleton().findSchema({std::string("aten::") + name, overload});
  if (!op.has_value()) {
    return; // the lists name operators that some releases do not have
  }
  const auto& arguments = op->schema().arguments();
  int dtype_arg = -1;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "dtype") {
      dtype_arg = static_cast<int>(i);
    }
  }
  const auto full = std::string(name) + (*overload ? "." : "") + overload;
  library.impl(full.c_str(),
               torch::CppFunction::makeFromBoxedFunctor(std::make_unique<AutocastKernel>(policy, dtype_arg)));
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define SOFT_PICK(_1, _2, NAME, ...) NAME
#define SOFT_PLAIN(OP) #OP, ""
#define SOFT_OVERLOAD(OP, OVERLOAD) #OP, #OVERLOAD
#define SOFT_NAMES(...) SOFT_PICK(__VA_ARGS__, SOFT_OVERLOAD, SOFT_PLAIN)(__VA_ARGS__)
#define SOFT_LOWER_PRECISION(...) add(m, SOFT_NAMES(__VA_ARGS__), Policy::lower_precision);
#define SOFT_FP32(...) add(m, SOFT_NAMES(__VA_ARGS__), Policy::fp32);
#define SOFT_FP32_RESULT(...) add(m, SOFT_NAMES(__VA_ARGS__), Policy::fp32_result);
#define SOFT_WIDEST(...) add(m, SOFT_NAMES(__VA_ARGS__), Policy::widest);

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SOFT_LOWER_PRECISION)
  AT_FORALL_FP32(SOFT_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SOFT_FP32_RESULT)
  AT_FORALL_PROMOTE(SOFT_WIDEST)
  add(m, "norm", "Scalar", Policy::fp32_result);
  add(m, "norm", "ScalarOpt_dim", Policy::fp32_result);
  add(m, "cat", "", Policy::widest);
  add(m, "stack", "", Policy::widest);
  add(m, "binary_cross_entropy", "", Policy::refuse);
}

} // namespace
} // namespace soft
