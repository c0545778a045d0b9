// One boxed kernel for every operator: run the CPU's kernel on aliases.
//
// Arguments become CPU tensors over the same memory (no copy), the CPU kernel
// runs, and results become soft tensors: an argument keeps its identity, a view
// keeps its storage, a fresh result is adopted, a resized out= carries its new
// storage back.
#include "soft.h"

#include <ATen/Context.h>
#include <ATen/TracerMode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

namespace soft {
namespace {

using c10::IValue;
using torch::jit::Stack;

// ---------------------------------------------------------------------------
// What is known about an operator before it is ever called.

enum class HostTensors : uint8_t {
  none, // a CPU tensor beside a soft one is an error, as on any device
  scalars, // zero-dim CPU tensors act as numbers
  any, // CPU tensors belong there (copies, index tensors, sequence lengths)
};

struct Plan {
  std::string name; // aten::add.Tensor
  HostTensors host_tensors = HostTensors::none;
  bool across_devices = false; // copies may go from one soft device to another
  int generator_arg = -1;
  int64_t host_outputs = 0; // bit i: output i stays on the CPU, as CUDA leaves it
  bool widens = false; // the CPU lacks a dtype that CUDA has: a wider one is taken in its place
  c10::SmallVector<bool, 8> written; // by argument
};

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

HostTensors host_tensor_rule(const std::string& base, const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> any = {
      "aten::copy_", "aten::copy", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::index", "aten::_unsafe_index",
      "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_index_put_impl", "aten::_unsafe_index_put",
      "aten::_unsafe_masked_index", "aten::_pack_padded_sequence", "aten::_pack_padded_sequence_backward",
      "aten::_ctc_loss", "aten::_ctc_loss_backward", "aten::is_same_size", "aten::is_set_to", "aten::set_",
  };
  static const std::unordered_set<std::string> scalars = {
      "aten::fill", "aten::fill_", "aten::index_fill", "aten::index_fill_", "aten::masked_fill", "aten::masked_fill_",
      "aten::linspace", "aten::logspace", "aten::where", "aten::clamp", "aten::clamp_", "aten::isin",
      "aten::searchsorted", "aten::bucketize", "aten::lerp", "aten::lerp_", "aten::normal", "aten::dist",
      "aten::_to_copy", "aten::result_type",
  };
  if (any.count(base)) {
    return HostTensors::any;
  }
  if (scalars.count(base) || starts_with(base, "aten::_fused_")) { // the fused optimizers' steps and rates
    return HostTensors::scalars;
  }
  const auto tags = op.getTags();
  for (const auto tag : tags) {
    if (tag == at::Tag::pointwise) {
      return HostTensors::scalars;
    }
  }
  return HostTensors::none;
}

// Dense operators that CUDA has in half precision or for truth values, and the CPU has not. (FFTs in half precision ask
// for the type of the device before they get here.)
bool widens(const std::string& base) {
  static const std::unordered_set<std::string> names = {
      "aten::abs", "aten::abs_", "aten::avg_pool3d", "aten::avg_pool3d_backward", "aten::multi_margin_loss",
      "aten::multi_margin_loss_backward", "aten::multilabel_margin_loss_forward", "aten::multilabel_margin_loss_backward",
      "aten::polygamma", "aten::polygamma_", "aten::round", "aten::round_", "aten::rrelu_with_noise",
      "aten::rrelu_with_noise_", "aten::rrelu_with_noise_backward", "aten::_upsample_bilinear2d_aa",
      "aten::_upsample_bilinear2d_aa_backward", "aten::_upsample_bicubic2d_aa", "aten::_upsample_bicubic2d_aa_backward",
  };
  return names.count(base) > 0;
}

Plan make_plan(const c10::OperatorHandle& op) {
  Plan plan;
  const auto& schema = op.schema();
  const auto base = schema.name();
  plan.name = schema.overload_name().empty() ? base : base + "." + schema.overload_name();
  plan.host_tensors = host_tensor_rule(base, op);
  plan.across_devices = base == "aten::copy_" || base == "aten::copy";
  plan.widens = widens(base);
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    plan.written.push_back(alias != nullptr && alias->isWrite());
    if (arguments[i].name() == "generator") {
      plan.generator_arg = static_cast<int>(i);
    }
  }
  if (base == "aten::_pack_padded_sequence") {
    plan.host_outputs = 1 << 1; // batch_sizes
  }
  return plan;
}

// ---------------------------------------------------------------------------
// Faults: a hook around chosen operators; one relaxed load when there is none.

std::atomic<FaultHook*> g_hook{nullptr};
std::shared_mutex& g_hook_mutex = *new std::shared_mutex();
std::unordered_set<std::string>& g_hooked = *new std::unordered_set<std::string>();

std::unordered_set<std::string>& g_planned = *new std::unordered_set<std::string>(); // filled at load, then read only

// ---------------------------------------------------------------------------
// Aliases.

void release_soft_storage(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context));
}

// A CPU storage over the memory of `storage`, which it keeps alive.
c10::Storage host_storage(c10::StorageImpl* storage) {
  c10::raw::intrusive_ptr::incref(storage);
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
      c10::DataPtr(storage->mutable_data(), storage, &release_soft_storage, c10::Device(c10::kCPU)),
      c10::GetCPUAllocator(), storage->resizable());
}

void copy_bits(const at::TensorImpl& from, at::TensorImpl& to) {
  if (from.is_conj()) {
    to._set_conj(true);
  }
  if (from.is_neg()) {
    to._set_neg(true);
  }
}

at::Tensor like(const at::Tensor& from, c10::Storage storage, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), from.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto* source = from.unsafeGetTensorImpl();
  if (!(source->dim() == 1 && source->sizes()[0] == 0 && source->strides()[0] == 1 && source->storage_offset() == 0)) {
    impl->set_sizes_and_strides(source->sizes(), source->strides(), source->storage_offset());
  }
  copy_bits(*source, *impl);
  return tensor;
}

bool same_geometry(const at::TensorImpl& a, const at::TensorImpl& b) {
  return a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// The translation of one call: soft tensors and their CPU aliases, both ways.
class Call {
 public:
  Call(const Plan& plan, bool sparse) : plan_(plan), sparse_(sparse) {}

  void translate_arguments(Stack& stack, size_t count) {
    const auto first = stack.size() - count;
    for (size_t i = 0; i < count; ++i) {
      const bool written = i < plan_.written.size() && plan_.written[i];
      translate(stack[first + i], written);
    }
    if (host_tensor_seen_ && device_ >= 0) {
      check_host_tensors(stack, first, count);
    }
    if (plan_.generator_arg >= 0) {
      // A soft generator alone brings a call here: its tensors are then the CPU's.
      TORCH_CHECK(device_ >= 0 || !host_tensor_seen_,
                  "Expected a 'cpu' device type for generator but found 'soft' (in ", plan_.name, ")");
      auto& generator = stack[first + plan_.generator_arg];
      generator = generator.isNone() ? host_generator(default_generator(device()))
                                     : host_generator(generator.toGenerator());
    }
  }

  void translate_results(Stack& stack, size_t count) {
    const auto first = stack.size() - count;
    for (size_t i = 0; i < count; ++i) {
      if (!(plan_.host_outputs >> i & 1)) {
        translate_back(stack[first + i]);
      }
    }
    carry_back();
  }

  c10::DeviceIndex device() const {
    return device_ >= 0 ? device_ : current_device();
  }

 private:
  struct Alias {
    at::Tensor soft, host;
    bool written;
  };
  struct Memory {
    c10::StorageImpl* soft;
    c10::Storage host;
  };

  void translate(IValue& value, bool written) {
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (tensor.defined()) {
        auto host = to_host(tensor, written);
        if (host.defined()) {
          value = std::move(host);
        }
      }
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) {
        if (tensor.defined()) {
          auto host = to_host(tensor, written);
          if (host.defined()) {
            tensor = std::move(host);
          }
        }
      }
      value = IValue(std::move(list));
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorList();
      c10::List<std::optional<at::Tensor>> hosts;
      hosts.reserve(list.size());
      for (const auto& item : list) {
        std::optional<at::Tensor> tensor = item;
        if (tensor.has_value() && tensor->defined()) {
          auto host = to_host(*tensor, written);
          if (host.defined()) {
            tensor = std::move(host);
          }
        }
        hosts.push_back(std::move(tensor));
      }
      value = IValue(std::move(hosts));
    } else if (value.isDevice()) {
      const auto device = value.toDevice();
      if (device.type() == kSoft) {
        note_device(checked_index(device.index()));
        value = c10::Device(c10::kCPU);
      }
    }
  }

  // Undefined for a tensor that needs no alias.
  at::Tensor to_host(const at::Tensor& tensor, bool written) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    if (impl->device_type() != kSoft) {
      host_tensor_seen_ |= impl->device_type() == c10::kCPU && !impl->is_wrapped_number();
      TORCH_CHECK(impl->device_type() == c10::kCPU || impl->device_type() == c10::kMeta,
                  "Expected all tensors to be on the same device, but found soft and ", tensor.device(), " (in ",
                  plan_.name, ")");
      if (C10_UNLIKELY(written)) {
        written_hosts_.push_back(tensor);
      }
      return {};
    }
    const bool sparse = is_sparse(tensor);
    TORCH_CHECK_NOT_IMPLEMENTED(sparse || (impl->layout() == c10::kStrided && !tensor.is_quantized()),
                                "soft: only strided and sparse tensors are supported, got layout ", impl->layout(),
                                " in ", plan_.name);
    note_device(impl->device().index());
    for (auto& alias : aliases_) {
      if (alias.soft.unsafeGetTensorImpl() == impl) {
        alias.written |= written;
        return alias.host;
      }
    }
    at::Tensor host;
    if (C10_UNLIKELY(sparse)) {
      host = sparse_alias(tensor, c10::kCPU, [&](const at::Tensor& part) { return to_host(part, written); });
    } else if (C10_UNLIKELY(impl->key_set().has(c10::DispatchKey::ZeroTensor))) {
      host = at::_efficientzerotensor(impl->sizes(), at::TensorOptions().dtype(impl->dtype()));
    } else {
      host = like(tensor, host_memory(impl->storage().unsafeGetStorageImpl()), c10::DispatchKey::CPU);
    }
    if (impl->is_wrapped_number()) {
      host.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    if (C10_UNLIKELY(sparse_ && impl->requires_grad())) { // some sparse kernels ask, to keep what backward needs
      host.unsafeGetTensorImpl()->set_requires_grad(true);
    }
    aliases_.push_back({tensor, host, written});
    return host;
  }

  void note_device(c10::DeviceIndex index) {
    if (C10_UNLIKELY(device_ >= 0 && device_ != index && !plan_.across_devices)) {
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, soft:",
                  static_cast<int>(device_), " and soft:", static_cast<int>(index), "! (in ", plan_.name, ")");
    }
    if (device_ < 0) {
      device_ = index;
    }
  }

  const c10::Storage& host_memory(c10::StorageImpl* storage) {
    for (const auto& memory : memories_) {
      if (memory.soft == storage) {
        return memory.host;
      }
    }
    memories_.push_back({storage, host_storage(storage)});
    return memories_.back().host;
  }

  bool is_alias(const at::Tensor& tensor) const {
    for (const auto& alias : aliases_) {
      if (alias.host.is_same(tensor)) {
        return true;
      }
    }
    return false;
  }

  void check_host_tensors(const Stack& stack, size_t first, size_t count) const {
    if (plan_.host_tensors == HostTensors::any) {
      return;
    }
    auto check = [&](const at::Tensor& tensor, bool written) {
      if (!tensor.defined() || is_alias(tensor) || tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        return;
      }
      const bool number = plan_.host_tensors == HostTensors::scalars && tensor.dim() == 0 && !written;
      TORCH_CHECK(number, "Expected all tensors to be on the same device, but found at least two devices, soft:",
                  static_cast<int>(device_), " and ", tensor.device(), "! (in ", plan_.name, ")");
    };
    for (size_t i = 0; i < count; ++i) {
      const auto& value = stack[first + i];
      const bool written = i < plan_.written.size() && plan_.written[i];
      if (value.isTensor()) {
        check(value.toTensor(), written);
      } else if (value.isTensorList()) {
        for (const auto& tensor : value.toTensorVector()) {
          check(tensor, written);
        }
      } else if (value.isOptionalTensorList()) {
        for (const auto& tensor : value.toOptionalTensorVector()) {
          if (tensor.has_value()) {
            check(*tensor, written);
          }
        }
      }
    }
  }

  void translate_back(IValue& value) {
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (tensor.defined()) {
        value = to_soft(tensor);
      }
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) {
        if (tensor.defined()) {
          tensor = to_soft(tensor);
        }
      }
      value = IValue(std::move(list));
    }
  }

  at::Tensor to_soft(const at::Tensor& host) {
    for (const auto& alias : aliases_) {
      if (alias.host.is_same(host)) {
        return alias.soft;
      }
    }
    if (host.device().type() != c10::kCPU) {
      return host;
    }
    for (const auto& written : written_hosts_) { // the target of a copy from the device stays where it is
      if (written.is_same(host)) {
        return host;
      }
    }
    if (C10_UNLIKELY(is_sparse(host))) {
      auto soft = sparse_alias(host, c10::Device(kSoft, device()), [&](const at::Tensor& part) { return to_soft(part); });
      aliases_.push_back({soft, host, false});
      return soft;
    }
    const auto* impl = host.unsafeGetTensorImpl();
    TORCH_CHECK_NOT_IMPLEMENTED(
        impl->layout() == c10::kStrided && !host.is_quantized() && !host.is_nested(), "soft: ", plan_.name,
        " would return a ", host.is_quantized() ? "quantized" : host.is_nested() ? "nested" : c10::str(impl->layout()),
        " tensor, which the software accelerator does not have. Move the input to the CPU first (.cpu()).");
    if (C10_UNLIKELY(impl->key_set().has(c10::DispatchKey::ZeroTensor))) {
      return at::_efficientzerotensor(
          impl->sizes(), at::TensorOptions().dtype(impl->dtype()).device(c10::Device(kSoft, device())));
    }
    auto soft = like(host, soft_memory(host.storage()), c10::DispatchKey::PrivateUse1);
    aliases_.push_back({soft, host, false}); // the same result twice is one tensor
    return soft;
  }

  c10::Storage soft_memory(const c10::Storage& host) {
    for (const auto& memory : memories_) {
      if (memory.host.unsafeGetStorageImpl() == host.unsafeGetStorageImpl()) {
        return c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(memory.soft));
      }
    }
    c10::Storage soft = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), host.nbytes(), adopt(host, device()), allocator(), /*resizable=*/true);
    memories_.push_back({soft.unsafeGetStorageImpl(), host});
    return soft;
  }

  // Writes that changed more than data: a resized out=, a moved storage.
  void carry_back() {
    const auto count = aliases_.size(); // those of the arguments: what follows may add others
    for (size_t i = 0; i < count; ++i) {
      const auto alias = aliases_[i];
      if (!alias.written) {
        continue;
      }
      if (C10_UNLIKELY(is_sparse(alias.soft))) {
        fill_sparse(alias.host, alias.soft, [&](const at::Tensor& part) { return to_soft(part); });
        continue;
      }
      auto* soft = alias.soft.unsafeGetTensorImpl();
      auto* host = alias.host.unsafeGetTensorImpl();
      auto* storage = soft->storage().unsafeGetStorageImpl();
      auto* backing = host->storage().unsafeGetStorageImpl();
      if (C10_UNLIKELY(storage->data() != backing->data() || storage->nbytes() != backing->nbytes())) {
        storage->set_data_ptr_noswap(adopt(host->storage(), soft->device().index()));
        storage->set_nbytes(backing->nbytes());
      }
      if (C10_UNLIKELY(!same_geometry(*soft, *host))) {
        soft->set_sizes_and_strides(host->sizes(), host->strides(), host->storage_offset());
      }
    }
  }

  const Plan& plan_;
  const bool sparse_; // one of the CPU's sparse kernels will run
  c10::SmallVector<Alias, 6> aliases_;
  c10::SmallVector<at::Tensor, 1> written_hosts_; // arguments on the host that the operator writes to
  c10::SmallVector<Memory, 6> memories_;
  c10::DeviceIndex device_ = -1;
  bool host_tensor_seen_ = false;
};

// What the kernel calls in turn belongs to it: neither autograd nor the CPU's autocast may step in between.
constexpr auto kBelow = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

void run_on_host(const c10::OperatorHandle& op, Stack* stack, c10::DispatchKey key) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kBelow);
  try {
    op.redispatchBoxed(c10::DispatchKeySet(key), stack);
  } catch (const c10::Error& error) {
    rethrow_if_out_of_memory(error);
    throw;
  }
}

c10::ScalarType wider(c10::ScalarType dtype) {
  if (dtype == c10::kBool) {
    return c10::kByte;
  }
  return dtype == c10::kHalf || dtype == c10::kBFloat16 ? c10::kFloat : dtype;
}

// The call with wider copies of its tensors, whose results are narrowed again.
void run_wider(const c10::OperatorHandle& op, const Plan& plan, Stack* stack, c10::DispatchKey key, Stack arguments) {
  auto narrow = c10::ScalarType::Undefined;
  c10::SmallVector<std::pair<at::Tensor, at::Tensor>, 2> written; // each with its copy
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto tensor = arguments[i].isTensor() ? arguments[i].toTensor() : at::Tensor();
    if (!tensor.defined() || wider(tensor.scalar_type()) == tensor.scalar_type()) {
      continue;
    }
    narrow = narrow == c10::ScalarType::Undefined ? tensor.scalar_type() : narrow;
    arguments[i] = tensor.to(wider(tensor.scalar_type()));
    if (plan.written[i]) {
      written.emplace_back(tensor, arguments[i].toTensor());
    }
  }
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  run_on_host(op, stack, key);
  for (const auto& [tensor, copy] : written) {
    tensor.resize_(copy.sizes()).copy_(copy);
  }
  for (auto i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    auto& result = (*stack)[i];
    const auto tensor = result.isTensor() ? result.toTensor() : at::Tensor();
    const auto* target = std::find_if(
        written.begin(), written.end(), [&](const auto& pair) { return pair.second.is_same(tensor); });
    if (target != written.end()) {
      result = target->first;
    } else if (tensor.defined() && tensor.scalar_type() == wider(narrow)) {
      result = tensor.to(narrow);
    }
  }
}

// The CPU's own kernel first: dtypes that it has give what it gives.
void run_widening(const c10::OperatorHandle& op, const Plan& plan, Stack* stack, c10::DispatchKey key) {
  const auto below = stack->size() - op.schema().arguments().size();
  Stack arguments(stack->begin() + static_cast<std::ptrdiff_t>(below), stack->end());
  try {
    run_on_host(op, stack, key);
    return;
  } catch (const c10::NotImplementedError&) {
    const bool narrow = std::any_of(arguments.begin(), arguments.end(), [](const IValue& value) {
      return value.isTensor() && value.toTensor().defined() &&
          wider(value.toTensor().scalar_type()) != value.toTensor().scalar_type();
    });
    if (!narrow) {
      throw;
    }
  }
  stack->resize(below);
  run_wider(op, plan, stack, key, std::move(arguments));
}

void run(
    const c10::OperatorHandle& op, const Plan& plan, Stack* stack, c10::DispatchKey key = c10::DispatchKey::CPU) {
  const auto& schema = op.schema();
  Call call(plan, key != c10::DispatchKey::CPU);
  call.translate_arguments(*stack, schema.arguments().size());

  auto* hook = key == c10::DispatchKey::CPU ? fault_hook_for(plan.name) : nullptr; // faults are those of dense kernels
  void* token = nullptr;
  if (C10_UNLIKELY(hook != nullptr)) {
    const Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size()), stack->end());
    token = hook->before(op, call.device(), arguments);
  }
  if (C10_UNLIKELY(plan.widens)) {
    run_widening(op, plan, stack, key);
  } else {
    run_on_host(op, stack, key);
  }
  if (C10_UNLIKELY(token != nullptr)) {
    const Stack outputs(stack->end() - static_cast<std::ptrdiff_t>(schema.returns().size()), stack->end());
    hook->after(token, outputs);
  }
  call.translate_results(*stack, schema.returns().size());
}

// The tracer (torch.jit.trace) does not record `convolution` but what that calls, which must get the soft tensors.
struct Convolution final : public c10::OperatorKernel {
  explicit Convolution(Plan plan) : plan(std::move(plan)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
    if (C10_LIKELY(!at::tracer::impl::is_dispatch_enabled())) {
      run(op, plan, stack);
      return;
    }
    static const auto traced = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_convolution", "");
    const auto& context = at::globalContext();
    const bool deterministic = context.deterministicCuDNN() || context.deterministicAlgorithms();
    for (const bool flag : {context.benchmarkCuDNN(), deterministic, context.userEnabledCuDNN(), /*TF32=*/true}) {
      stack->emplace_back(flag);
    }
    traced.callBoxed(stack);
  }
  Plan plan;
};

// Kernel of one operator, its plan made once.
struct Kernel final : public c10::OperatorKernel {
  explicit Kernel(Plan plan) : plan(std::move(plan)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
    run(op, plan, stack);
  }
  Plan plan;
};

// The plan of an operator that got none at load time; it is made at its first call.
const Plan& plan_of(const c10::OperatorHandle& op) {
  static std::shared_mutex& mutex = *new std::shared_mutex();
  static auto& plans = *new std::unordered_map<c10::OperatorName, std::unique_ptr<Plan>>();
  const auto& name = op.operator_name();
  const Plan* plan = nullptr;
  {
    const std::shared_lock lock(mutex);
    const auto it = plans.find(name);
    plan = it == plans.end() ? nullptr : it->second.get();
  }
  if (plan == nullptr) {
    auto made = std::make_unique<Plan>(make_plan(op));
    const std::unique_lock lock(mutex);
    plan = plans.emplace(name, std::move(made)).first->second.get();
  }
  return *plan;
}

// Operators registered after us (other libraries, torch.library).
void run_unplanned(const c10::OperatorHandle& op, Stack* stack) {
  const auto& plan = plan_of(op);
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
          op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
          op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
          op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional),
      "Could not run '", plan.name, "' on 'soft': the software accelerator runs the CPU's kernels, and the CPU has none "
      "for this operator.");
  run(op, plan, stack);
}

void run_sparse(const c10::OperatorHandle& op, Stack* stack) {
  run(op, plan_of(op), stack, c10::DispatchKey::SparseCPU);
}
void run_compressed(const c10::OperatorHandle& op, Stack* stack) {
  run(op, plan_of(op), stack, c10::DispatchKey::SparseCsrCPU);
}

void refuse(const char* what, const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  TORCH_CHECK_NOT_IMPLEMENTED(false, "Could not run '", name.name, name.overload_name.empty() ? "" : ".",
                              name.overload_name, "' on 'soft': ", what,
                              " tensors are not supported there. Keep them on the CPU, or make them dense first.");
}
void refuse_quantized(const c10::OperatorHandle& op, Stack* /*stack*/) {
  refuse("quantized", op);
}
void refuse_nested(const c10::OperatorHandle& op, Stack* /*stack*/) {
  refuse("nested (strided)", op);
}

// --- Which operators get a planned kernel at load time. -----------------------

bool takes(const c10::FunctionSchema& schema, std::string_view type) {
  for (const auto& argument : schema.arguments()) {
    if (argument.type()->annotation_str().find(type) != std::string::npos) {
      return true;
    }
  }
  return false;
}

bool returns_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

bool has_tag(const c10::OperatorHandle& op, at::Tag wanted) {
  for (const auto tag : op.getTags()) {
    if (tag == wanted) {
      return true;
    }
  }
  return false;
}

bool wants_planned_kernel(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> elsewhere = {
      // kernels.cpp
      "aten::empty", "aten::empty_strided", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::resize_",
      "aten::native_dropout", "aten::_efficientzerotensor", "aten::record_stream", "aten::set_",
      // made of others on every device
      "aten::_lazy_clone", "aten::resize_as_", "aten::native_dropout_backward",
  };
  const auto& schema = op.schema();
  // Lists may span devices, so they are left to be made of one call per tensor.
  if (starts_with(schema.name(), "aten::_foreach_")) {
    return false;
  }
  if (elsewhere.count(schema.name()) || returns_view(schema) || has_tag(op, at::Tag::inplace_view) ||
      takes(schema, "Storage") || takes(schema, "Stream")) {
    return false;
  }
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
    return true;
  }
  // Composite kernels may ask for the device and decide by it; on aliases they
  // decide as on the CPU. Left alone: those that choose a device, and random ones
  // without a generator argument, which must draw from the device's generator.
  const bool composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
  const bool draws = has_tag(op, at::Tag::nondeterministic_seeded) && !takes(schema, "Generator");
  return composite && !takes(schema, "Device") && !draws;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_unplanned>());
}
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_sparse>());
}
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_compressed>());
}
TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_quantized>());
}
TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_nested>());
}

// Operators that the CPU has a sparse kernel for; composite ones would take the place of a fallback.
template <void (*kernel)(const c10::OperatorHandle&, Stack*)>
void register_like(torch::Library& m, c10::DispatchKey key) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = starts_with(name.name, "aten::") ? dispatcher.findSchema(name) : std::nullopt;
    if (op.has_value() && op->hasKernelForDispatchKey(key)) {
      const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
    }
  }
}
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  register_like<&run_sparse>(m, c10::DispatchKey::SparseCPU);
}
TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  register_like<&run_compressed>(m, c10::DispatchKey::SparseCsrCPU);
}

// The constructors, too, which are made of dense tensors and would only fail at the first use of their result.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_nested_tensor_from_tensor_list", torch::CppFunction::makeFromBoxedFunction<&refuse_nested>());
  m.impl("_nested_view_from_buffer", torch::CppFunction::makeFromBoxedFunction<&refuse_nested>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!starts_with(name.name, "aten::")) {
      continue;
    }
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || !wants_planned_kernel(*op)) {
      continue;
    }
    auto plan = make_plan(*op);
    const auto registered = plan.name;
    g_planned.insert(registered);
    if (registered == "aten::convolution") {
      m.impl(registered.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Convolution>(std::move(plan))));
      continue;
    }
    m.impl(registered.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(std::move(plan))));
  }
}

} // namespace

at::Tensor host_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kSoft) {
    return tensor;
  }
  return like(tensor, host_storage(tensor.storage().unsafeGetStorageImpl()), c10::DispatchKey::CPU);
}

const std::unordered_set<std::string>& planned_operators() {
  return g_planned;
}

FaultHook* fault_hook_for(const std::string& name) {
  auto* hook = g_hook.load(std::memory_order_acquire);
  if (C10_LIKELY(hook == nullptr)) {
    return nullptr;
  }
  const std::shared_lock lock(g_hook_mutex);
  return g_hooked.count(name) ? hook : nullptr;
}

void set_fault_hook(FaultHook* hook, std::unordered_set<std::string> operators) {
  const std::unique_lock lock(g_hook_mutex);
  g_hooked = std::move(operators);
  g_hook.store(hook, std::memory_order_release);
}

} // namespace soft
