// The Python side of the runtime: everything torch.soft needs from C++.
#include "soft.h"

#include <ATen/core/ivalue.h>
#include <pybind11/stl.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

// Declared in torch/csrc/jit/python/pybind_utils.h, which takes ten seconds to parse.
namespace torch::jit {
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);
} // namespace torch::jit

namespace soft {

void bind_collectives(pybind11::module_& m); // collectives.cpp
void register_profiler(); // profiler.cpp

namespace {

namespace py = pybind11;

// Calls Python before and after chosen operators. A Python exception travels on
// as itself, also out of an autograd thread.
struct PythonHook final : public FaultHook {
  explicit PythonHook(py::object before_, py::object after_) : on_before(std::move(before_)), on_after(std::move(after_)) {}

  void* before(const c10::OperatorHandle& op, c10::DeviceIndex device, const torch::jit::Stack& stack) override {
    const py::gil_scoped_acquire gil;
    return guarded([&]() -> void* {
      const auto& name = op.operator_name();
      py::object token = on_before(name.name, name.overload_name, static_cast<int>(device), to_tuple(stack));
      return token.is_none() ? nullptr : token.release().ptr();
    });
  }
  void after(void* token, const torch::jit::Stack& outputs) override {
    const py::gil_scoped_acquire gil;
    guarded([&]() -> void* {
      const auto owned = py::reinterpret_steal<py::object>(static_cast<PyObject*>(token));
      on_after(owned, to_tuple(outputs));
      return nullptr;
    });
  }

  template <class F>
  static void* guarded(F&& body) {
    try {
      return body();
    } catch (py::error_already_set& error) {
      error.restore();
      python_error persisted;
      persisted.persist();
      throw persisted;
    }
  }
  static py::tuple to_tuple(const torch::jit::Stack& stack) {
    py::tuple values(stack.size());
    for (size_t i = 0; i < stack.size(); ++i) {
      values[i] = torch::jit::toPyObject(stack[i]);
    }
    return values;
  }

  py::object on_before, on_after;
};

bool is_distributed(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  return py::type::of(py::cast(tensor)).attr("__name__").cast<std::string>() == "DTensor";
}

// All bytes of a storage, as a tensor.
at::Tensor bytes_of(c10::Storage storage, c10::DispatchKey key) {
  const auto size = static_cast<int64_t>(storage.nbytes());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                         caffe2::TypeMeta::Make<uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return tensor;
}

py::dict stats_dict(int64_t device) {
  const auto stats = memory_stats(static_cast<c10::DeviceIndex>(device));
  py::dict result;
  result["allocated"] = stats.allocated;
  result["peak"] = stats.peak;
  result["total_allocated"] = stats.total_allocated;
  result["total_freed"] = stats.total_freed;
  result["blocks"] = stats.blocks;
  result["peak_blocks"] = stats.peak_blocks;
  result["total_blocks"] = stats.total_blocks;
  result["freed_blocks"] = stats.freed_blocks;
  result["ooms"] = stats.ooms;
  result["limit"] = stats.limit;
  return result;
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  auto index = [](int64_t device) { return static_cast<c10::DeviceIndex>(device); };
  m.def("set_device_count", &set_device_count);
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [index](int64_t device) { set_device(index(device)); });
  m.def("exchange_device", [index](int64_t device) { return static_cast<int>(exchange_device(index(device))); });
  m.def("default_generator", [index](int64_t device) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(index(device))));
  });
  m.def("share_random", &share_random);
  m.def("memory_stats", &stats_dict);
  m.def("memory_info", [index](int64_t device) { return memory_info(index(device)); });
  m.def("reset_peak", [index](int64_t device) { reset_peak(index(device)); });
  m.def("reset_accumulated", [index](int64_t device) { reset_accumulated(index(device)); });
  m.def("set_memory_limit", [index](int64_t device, int64_t bytes) { set_memory_limit(index(device), bytes); });
  m.def("host_alias", &host_alias);
  m.def("advanced_state", &advanced_state);
  m.def("adopted_bytes", [](const at::Tensor& soft) -> std::optional<at::Tensor> {
    auto host = adopted(soft.storage());
    return host.has_value() ? std::optional(bytes_of(*host, c10::DispatchKey::CPU)) : std::nullopt;
  });
  m.def("move_to", [](const at::Tensor& soft, const at::Tensor& host) {
    soft.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(adopt(host.storage(), soft.device().index()));
  });
  m.def("bytes_over", [index](const at::Tensor& host, int64_t device) {
    const auto where = checked_index(index(device));
    const auto bytes = host.storage().nbytes();
    return bytes_of(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                          adopt(host.storage(), where), allocator(), true),
                    c10::DispatchKey::PrivateUse1);
  });
  m.def("planned_operators", &planned_operators);
  m.def("set_fault_hook", [](py::object before, py::object after,
                            std::unordered_set<std::string> operators) {
    // Earlier hooks are kept: another thread may be inside one.
    auto* hook = before.is_none() ? nullptr : new PythonHook(std::move(before), std::move(after));
    set_fault_hook(hook, std::move(operators));
  });
  set_is_distributed(&is_distributed);
  bind_collectives(m);
  register_profiler();
}

} // namespace soft
