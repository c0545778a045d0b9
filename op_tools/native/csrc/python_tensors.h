// Tensors of PyTorch in extensions of Python: from an object to a tensor and back, errors, references. Everything runs under
// the GIL, which is the only lock.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/flat_hash_map.h>

#include <dlfcn.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using c10::StorageImpl;
using c10::TensorImpl;
using WeakTensor = c10::weak_intrusive_ptr<TensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<StorageImpl>;

template <typename Key, typename Value, typename Hash = std::hash<Key>>
using Map = ska::flat_hash_map<Key, Value, Hash>;

struct Owned {  // a reference that is given back at the end of its scope
  PyObject *object = nullptr;
  explicit Owned(PyObject *owned) : object(owned) {}
  Owned(const Owned &) = delete;
  Owned &operator=(const Owned &) = delete;
  ~Owned() { Py_XDECREF(object); }
  operator PyObject *() const { return object; }
};

struct PythonError {};  // thrown where Python's error is set

PyObject *checked(PyObject *made) {
  if (made == nullptr) throw PythonError{};
  return made;
}

// Run a method; errors of C++ become errors of Python.
template <typename Function>
PyObject *safely(Function function) {
  try {
    return function();
  } catch (const PythonError &) {
    return nullptr;
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, std::string(error.what()).substr(0, 300).c_str());
    return nullptr;
  }
}

using Wrap = PyObject *(*)(const at::TensorBase &);
Wrap wrap = nullptr;  // its name says how it takes its argument, which in either case is the address of a tensor
PyObject *get_cdata = nullptr;
PyTypeObject *tensor_type = nullptr, *parameter_type = nullptr;

PyObject *got(PyObject *getter, PyObject *object) {
  return Py_TYPE(getter)->tp_descr_get(getter, object, reinterpret_cast<PyObject *>(Py_TYPE(object)));
}

bool is_plain(PyObject *tensor) { return Py_TYPE(tensor) == tensor_type || Py_TYPE(tensor) == parameter_type; }

at::Tensor unwrapped(PyObject *tensor) {
  Owned address{checked(got(get_cdata, tensor))};
  auto *impl = static_cast<TensorImpl *>(PyLong_AsVoidPtr(address));
  if (impl == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "not a tensor");
    throw PythonError{};
  }
  return at::Tensor(c10::intrusive_ptr<TensorImpl>::reclaim_copy(impl));
}

int64_t version_of(const at::Tensor &tensor) {
  return tensor.is_inference() ? 0 : int64_t(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

// Where a tensor's elements begin, null where it has none.
const void *address_of(const at::Tensor &tensor) {
  if (!tensor.has_storage() || tensor.is_meta()) return nullptr;
  try {
    return tensor.unsafeGetTensorImpl()->storage().data() == nullptr ? nullptr : tensor.const_data_ptr();
  } catch (const std::exception &) {  // some wrapper tensors refuse
    return nullptr;
  }
}

WeakTensor weak(const at::Tensor &tensor) { return WeakTensor(tensor.getIntrusivePtr()); }

bool is_strided(const at::Tensor &tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// Raise an error in the main thread as soon as it runs Python: it is the user's Ctrl-C, or what a signal's handler raised.
int raise_now(void *error) {
  auto *held = static_cast<PyObject *>(error);
  PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(held)), held);
  Py_DECREF(held);
  return -1;
}

// Run what must not stop the training; `tell` gets what goes wrong, as an error of Python.
template <typename Tell, typename Function>
void guarded(Tell tell, Function function) {
  try {
    return function();
  } catch (const PythonError &) {
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, std::string(error.what()).substr(0, 300).c_str());
  }
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (error != nullptr && type != nullptr && !PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
    if (Py_AddPendingCall(raise_now, Py_NewRef(error)) != 0) Py_DECREF(error);
  } else if (error != nullptr) {
    tell(error);
  }
  for (PyObject *one : {type, error, trace}) Py_XDECREF(one);
  PyErr_Clear();
}

// How the driver of CUDA launches a kernel.
using LaunchKernel = int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

// The driver's numbers of the streams of one device.
struct Streams {
  c10::DeviceType type = c10::DeviceType::CPU;
  int index = 0;
  PyObject *raw_stream = nullptr;  // a function of the number of a device
  std::unordered_map<int64_t, int64_t> known;  // by PyTorch's numbers

  int64_t now() {
    const c10::impl::VirtualGuardImpl guard(type);
    const int64_t id = guard.getStream(c10::Device(type, c10::DeviceIndex(index))).id();
    auto found = known.find(id);
    if (found != known.end()) return found->second;
    Owned number{checked(PyObject_CallFunction(raw_stream, "i", index))};
    const int64_t raw = int64_t(PyLong_AsUnsignedLongLong(number));
    if (PyErr_Occurred()) throw PythonError{};
    return known[id] = raw;
  }
};

// Makes a device the current one, until the end of its scope.
struct OnDevice {
  const c10::impl::VirtualGuardImpl guard;
  const c10::Device before;
  const bool other;
  OnDevice(c10::DeviceType type, int index) : guard(type), before(guard.getDevice()), other(before.index() != index) {
    if (other) guard.setDevice(c10::Device(type, c10::DeviceIndex(index)));
  }
  ~OnDevice() {
    if (other) guard.uncheckedSetDevice(before);
  }
};

PyObject *bytes_of(const std::vector<int64_t> &numbers, size_t count) {
  return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(numbers.data()), Py_ssize_t(8 * count));
}

// (TensorBase, Tensor, Parameter): False where tensors cannot be handed to Python.
PyObject *set_types(PyObject *, PyObject *args) {
  PyObject *base, *tensor, *parameter;
  if (!PyArg_ParseTuple(args, "OOO", &base, &tensor, &parameter)) return nullptr;
  get_cdata = PyObject_GetAttrString(base, "_cdata");
  if (get_cdata == nullptr) return nullptr;
  tensor_type = reinterpret_cast<PyTypeObject *>(Py_NewRef(tensor));
  parameter_type = reinterpret_cast<PyTypeObject *>(Py_NewRef(parameter));
  void *library = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
  void *found = library == nullptr ? nullptr : dlsym(library, "_Z16THPVariable_WrapRKN2at10TensorBaseE");
  if (found == nullptr && library != nullptr) found = dlsym(library, "_Z16THPVariable_WrapN2at10TensorBaseE");
  wrap = reinterpret_cast<Wrap>(found);
  return PyBool_FromLong(wrap != nullptr && Py_TYPE(get_cdata)->tp_descr_get != nullptr);
}

}  // namespace
