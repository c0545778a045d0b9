// The book of a trace: which tensor is which, who made it, and the rows of what happened, in columns of numbers.
// `trace/book.py` has the twin in Python, which runs until this is compiled or where it cannot be, and says what each
// method is for. Everything here runs under the GIL, which is the only lock.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <structmember.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <typeindex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using c10::StorageImpl;
using c10::TensorImpl;
using WeakTensor = c10::weak_intrusive_ptr<TensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<StorageImpl>;

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

// As in `trace/format.py`.
enum Phase { kForward, kBackward, kRecomputed, kOptimizer };
enum Kind { kActivation, kParameter, kBuffer, kGradient, kState, kGiven };
enum Side { kInput, kOutput };
enum TableNumber { kTensors, kOperators, kEdges, kMemory, kTables };

struct Table {
  std::vector<std::string> columns;
  int64_t rows = 0, all = 0;
  size_t at = 0;
  template <typename T>
  Table &put(T value) {
    if (at == columns.size()) columns.emplace_back();
    columns[at++].append(reinterpret_cast<const char *>(&value), sizeof(T));
    return *this;
  }
  int64_t end() {
    at = 0;
    ++rows;
    return all++;
  }
};

struct Seen {
  WeakTensor tensor;
  int64_t version, number;
};
struct Role {
  WeakTensor tensor;
  int name, kind, module;
};
struct Parameter {
  WeakTensor tensor;
  int grad_name, module;
};
struct Block {
  WeakStorage storage;
  StorageImpl *key;
  int64_t number, bytes;
  int kind, module;
};
constexpr size_t kRecent = 64, kSweepEvery = 32;  // blocks that every operator asks after; operators between looks at all
struct Memory {  // of strided tensors: where it begins, and how it lies there
  const void *address = nullptr;
  int layout = -1;
  bool operator==(const Memory &other) const { return address == other.address && layout == other.layout; }
};
struct HashOfMemory {
  size_t operator()(const Memory &m) const { return std::hash<const void *>()(m.address) * 31 + m.layout; }
};
struct HashOfNumbers {
  size_t operator()(const std::vector<int64_t> &numbers) const {
    uint64_t hash = 0xCBF29CE484222325ull;
    for (int64_t number : numbers) hash = (hash ^ uint64_t(number)) * 0x100000001B3ull ^ (hash >> 29);
    return hash;
  }
};

struct Made {  // a call, by the numbers of the nodes that it made
  uint64_t since, now;
  PyObject *op, *location;
};

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

#include "trace_book_prints.h"

struct Book {
  // what Python gives: functions of the recorder
  PyObject *find_look, *launch, *flush;
  bool prints = false, closed = false;
  PyObject *failed = nullptr;  // told of what goes wrong in a backward pass: the number of the operator's name, the error
  PyObject *fresh = nullptr;  // pairs of a number and a tensor that is not printed yet
  Printer printer;            // prints most of them by itself, on a GPU
  int last_module = -1;
  std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
  Table tables[kTables];
  std::unordered_map<TensorImpl *, Seen> known;
  std::unordered_map<Memory, TensorImpl *, HashOfMemory> by_memory;
  std::unordered_map<StorageImpl *, int64_t> writers;  // the operator that wrote last
  std::unordered_map<std::vector<int64_t>, int, HashOfNumbers> looks, layouts;
  std::unordered_map<TensorImpl *, Role> roles;
  std::unordered_map<const void *, TensorImpl *> roles_at;  // by address: `.data` is the parameter, too
  std::unordered_map<Memory, int64_t, HashOfMemory> sent;   // gradients of this pass: the operator
  std::vector<Parameter> parameters;
  std::vector<Block> blocks;
  std::unordered_map<StorageImpl *, int64_t> present;  // storages that are blocks
  std::unordered_map<uint64_t, std::vector<Made>> calls;  // by thread: sums of gradients say whose they are
  int64_t block_count = 0;
  size_t clean_at = 8192, since_sweep = 0;
  std::vector<int64_t> key;  // of the tensor that is looked up now

  // Run what must not stop the training: what goes wrong is told, and the pass goes on. `name` is the operator's, or -1.
  template <typename Function>
  void guarded(int name, Function function) {
    try {
      return function();
    } catch (const PythonError &) {
    } catch (const std::exception &error) {
      PyErr_SetString(PyExc_RuntimeError, std::string(error.what()).substr(0, 300).c_str());
    }
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (failed != nullptr && error != nullptr) {
      Owned number{PyLong_FromLong(name)};
      Owned told{number == nullptr ? nullptr : PyObject_CallFunctionObjArgs(failed, number.object, error, nullptr)};
    }
    for (PyObject *one : {type, error, trace}) Py_XDECREF(one);
    PyErr_Clear();
  }

  // -- tensors ----------------------------------------------------------------------------------------------

  void find_key(const at::Tensor &tensor) {
    key.clear();
    key.push_back(int64_t(tensor.scalar_type()));
    key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
    key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
  }

  Memory memory_of(const at::Tensor &tensor) {
    const void *address = is_strided(tensor) ? address_of(tensor) : nullptr;
    if (address == nullptr) return {};
    find_key(tensor);
    auto found = layouts.find(key);
    if (found == layouts.end()) found = layouts.emplace(key, int(layouts.size())).first;
    return {address, found->second};
  }

  int look_of(const at::Tensor &tensor, PyObject *object) {
    const bool regular = is_strided(tensor);
    if (regular) {
      find_key(tensor);
      const auto device = tensor.device();
      for (int64_t part : {int64_t(device.type()), int64_t(device.index()), int64_t(tensor.requires_grad())}) key.push_back(part);
      auto found = looks.find(key);
      if (found != looks.end()) return found->second;
    }
    const std::vector<int64_t> kept = key;  // Python may ask for other tensors
    Owned there{object != nullptr ? Py_NewRef(object) : checked(wrap(tensor))};
    Owned number{checked(PyObject_CallOneArg(find_look, there))};
    const int look = int(PyLong_AsLong(number));
    if (regular) looks.emplace(kept, look);
    return look;
  }

  Role *role_of(const at::Tensor &tensor) {
    auto found = roles.find(tensor.unsafeGetTensorImpl());
    if (found != roles.end() && !found->second.tensor.expired()) return &found->second;
    const void *address = tensor.is_leaf() ? address_of(tensor) : nullptr;
    auto at = address == nullptr ? roles_at.end() : roles_at.find(address);
    if (at == roles_at.end()) return nullptr;
    found = roles.find(at->second);
    if (found == roles.end()) return nullptr;
    const auto owner = found->second.tensor.lock();
    return owner && is_strided(tensor) && owner->sizes() == tensor.sizes() ? &found->second : nullptr;
  }

  // `held` is what lies on this rank; `object` is the tensor in Python, or null.
  int64_t number(const at::Tensor &tensor, const at::Tensor &held, PyObject *object, int look, int64_t producer,
                 int64_t output, int module, bool wrote, bool print) {
    TensorImpl *key = tensor.unsafeGetTensorImpl();
    const int64_t version = version_of(tensor);
    auto at = known.find(key);
    const bool seen = at != known.end() && !at->second.tensor.expired();
    if (seen && at->second.version == version && !wrote) return at->second.number;
    StorageImpl *storage = held.has_storage() ? held.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl() : nullptr;
    const Memory memory = memory_of(held);
    if (!seen && !wrote && producer < 0 && memory.address != nullptr) {
      auto same = by_memory.find(memory);
      auto other = same == by_memory.end() ? known.end() : known.find(same->second);
      if (other != known.end() && !other->second.tensor.expired() && other->second.version == version)
        return other->second.number;
    }
    if (producer < 0 && !wrote) {
      auto writer = writers.find(storage);
      if (writer != writers.end()) producer = writer->second;
    }
    int64_t base = seen ? at->second.number : -1;
    if (base < 0 && tensor.is_view()) {
      auto whole = known.find(tensor._base().unsafeGetTensorImpl());
      if (whole != known.end() && !whole->second.tensor.expired()) base = whole->second.number;
    }
    if (look < 0) look = look_of(tensor, object);  // may run Python
    Role *role = role_of(tensor);
    Table &table = tables[kTensors];
    table.put(uint8_t(role != nullptr ? role->kind : producer < 0 ? kGiven : kActivation));
    table.put(int32_t(role != nullptr ? role->name : 0)).put(int32_t(look)).put(int32_t(producer));
    table.put(int16_t(std::min<int64_t>(output, 32767))).put(int32_t(base));
    table.put(int32_t(role != nullptr ? role->module : module));
    const int64_t made = table.end();
    known.insert_or_assign(key, Seen{weak(tensor), version, made});
    if (memory.address != nullptr) by_memory[memory] = key;
    if (known.size() > clean_at) clean();
    if (prints && print && !printer.take(tensor, made)) {
      Owned there{object != nullptr ? Py_NewRef(object) : checked(wrap(tensor.variable_data()))};
      Owned pair{checked(Py_BuildValue("(LO)", static_cast<long long>(made), there.object))};
      if (PyList_Append(fresh, pair) < 0) throw PythonError{};
    }
    return made;
  }

  void clean() {
    for (auto at = known.begin(); at != known.end();) at = at->second.tensor.expired() ? known.erase(at) : std::next(at);
    for (auto at = by_memory.begin(); at != by_memory.end();)
      at = known.count(at->second) ? std::next(at) : by_memory.erase(at);
    clean_at = 2 * known.size() + 8192;
  }

  void name(const at::Tensor &tensor, int text, int kind, int module) {
    roles.insert_or_assign(tensor.unsafeGetTensorImpl(), Role{weak(tensor), text, kind, module});
    const Memory memory = memory_of(tensor);
    if (memory.address != nullptr && kind != kGradient) roles_at[memory.address] = tensor.unsafeGetTensorImpl();
    if (roles.size() > 4 * (parameters.size() + 4096))
      for (auto at = roles.begin(); at != roles.end();) at = at->second.tensor.expired() ? roles.erase(at) : std::next(at);
  }

  // -- operators and memory ---------------------------------------------------------------------------------

  // Print the new tensors of a call.
  void print_fresh() {
    if (!prints) return;
    printer.launch();
    if (PyList_GET_SIZE(fresh) > 0) Owned{checked(PyObject_CallNoArgs(launch))};
  }

  void flush_when_due() {
    for (const Table &table : tables)
      if (table.rows >= 16384) {
        Owned{checked(PyObject_CallNoArgs(flush))};
        return;
      }
  }

  int64_t add_operator(int step, int phase, int name, int module, int location, int stack, int arguments, int region,
                       int64_t stream, int group, int64_t forward) {
    write_frees();
    const std::chrono::duration<double> since = std::chrono::steady_clock::now() - began;
    Table &table = tables[kOperators];
    table.put(int32_t(step)).put(uint8_t(phase)).put(int32_t(name)).put(int32_t(module)).put(int32_t(location));
    table.put(int32_t(stack)).put(int32_t(arguments)).put(int32_t(region)).put(int64_t(stream)).put(int32_t(group));
    table.put(int32_t(forward)).put(double(since.count())).put(int32_t(0));
    return table.end();
  }

  void edge(int64_t op, int side, int64_t place, int64_t tensor) {
    Table &table = tables[kEdges];
    table.put(int32_t(op)).put(uint8_t(side)).put(int16_t(std::min<int64_t>(place, 32767))).put(int32_t(tensor)).end();
  }

  void memory_row(int64_t op, int64_t block, int64_t bytes, int kind, int module) {
    tables[kMemory].put(int32_t(op)).put(int32_t(block)).put(bytes).put(uint8_t(kind)).put(int32_t(module)).end();
  }

  void allocated(int64_t op, int module, const at::Tensor &tensor, int kind) {
    if (!tensor.has_storage() || tensor.is_meta()) return;
    const auto &storage = tensor.unsafeGetTensorImpl()->storage();
    StorageImpl *key = storage.unsafeGetStorageImpl();
    if (key == nullptr || !present.emplace(key, block_count).second) return;
    const auto size = int64_t(storage.nbytes());
    blocks.push_back({storage.getWeakStorageImpl(), key, block_count, size, kind, module});
    memory_row(op, block_count++, size, kind, module);
  }

  // Memory that is gone. Most of it is what was taken last, by temporary tensors or, in a backward pass, by the last layers;
  // the rest is looked through now and then: to ask after every block at every operator would cost more than all else.
  void write_frees(bool all = false) {
    all = all || ++since_sweep >= kSweepEvery;
    if (all) since_sweep = 0;
    size_t kept = all || blocks.size() <= kRecent ? 0 : blocks.size() - kRecent;
    for (size_t i = kept; i < blocks.size(); ++i) {
      Block &block = blocks[i];
      if (!block.storage.expired()) {
        if (kept != i) blocks[kept] = std::move(block);
        ++kept;
        continue;
      }
      memory_row(tables[kOperators].all, block.number, -block.bytes, block.kind, block.module);
      present.erase(block.key);
      writers.erase(block.key);
    }
    blocks.erase(blocks.begin() + long(kept), blocks.end());
  }

  void note_nodes(uint64_t since, uint64_t now, PyObject *op, PyObject *location) {
    auto &own = calls[at::RecordFunction::currentThreadId()];
    if (own.size() >= 20000) {
      for (size_t i = 0; i < 10000; ++i) {
        Py_DECREF(own[i].op);
        Py_DECREF(own[i].location);
      }
      own.erase(own.begin(), own.begin() + 10000);
    }
    own.push_back({since, now, Py_NewRef(op), Py_NewRef(location)});
  }

  void forget_calls() {
    for (auto &[thread, own] : calls)
      for (Made &call : own) {
        Py_DECREF(call.op);
        Py_DECREF(call.location);
      }
    calls.clear();
  }

  // Gradients of parameters get their names; `function` is compiled code that may have left them, or -1.
  void after_backward(int64_t function) {
    for (size_t place = 0; place < parameters.size(); ++place) {
      const auto locked = parameters[place].tensor.lock();
      if (!locked) continue;
      const at::Tensor grad = at::Tensor(locked).grad();
      if (!grad.defined()) continue;
      const int module = parameters[place].module;
      name(grad, parameters[place].grad_name, kGradient, module);
      auto at = known.find(grad.unsafeGetTensorImpl());
      if (at == known.end() || at->second.tensor.expired() || at->second.version != version_of(grad)) {
        auto from = sent.find(memory_of(grad));
        const int64_t producer = from == sent.end() ? function : from->second;
        const int64_t made = number(grad, grad, nullptr, -1, producer, int64_t(place), -1, true, true);
        if (producer == function && function >= 0) edge(function, kOutput, int64_t(place), made);
      }
      allocated(tables[kOperators].all - 1, module, grad, kGradient);
    }
    sent.clear();
    write_frees(true);
  }
};

#include "trace_book_calls.h"

struct BookObject {
  PyObject_HEAD
  Book *book;
};
Book *book_in(PyObject *object) { return reinterpret_cast<BookObject *>(object)->book; }

#include "trace_book_sums.h"

#include "trace_book_python.h"

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject *PyInit_op_tools_book() {
  PyObject *module = PyModule_Create(&definition);
  PyObject *book = module == nullptr ? nullptr : PyType_FromSpec(&book_spec);
  if (book == nullptr || PyModule_AddObject(module, "Book", book) < 0) {
    Py_XDECREF(book);
    Py_CLEAR(module);
  }
  return module;
}
