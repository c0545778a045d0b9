// The book of a trace: which tensor is which, who made it, and the rows of what happened, in columns of numbers.
// `trace/book.py` has the twin in Python, which runs until this is compiled or where it cannot be, and says what each
// method is for.

#include "call_backward.h"

#include <frameobject.h>
#include <structmember.h>

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/api/include/torch/version.h>

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 9)
#define BOOK_HAS_LEVELS 1
#include <c10/core/CachingDeviceAllocator.h>
#else
#define BOOK_HAS_LEVELS 0
#endif

#include <chrono>
#include <cstring>
#include <map>
#include <tuple>

namespace {

#include "trace_book_rows.h"
#include "trace_book_levels.h"
#include "trace_book_prints.h"

struct Book {
  explicit Book(c10::DeviceType accelerator) : levels(accelerator) {
    Level now;
    if (levels.changed(now)) level_row(-1, now);
  }

  // what Python gives: functions of the recorder
  PyObject *find_look, *launch, *flush;
  bool prints = false, closed = false;
  PyObject *failed = nullptr;  // told of what goes wrong in a backward pass: the number of the operator's name, the error
  PyObject *fresh = nullptr;  // pairs of a number and a tensor that is not printed yet
  Printer printer;            // prints most of them by itself, on a GPU
  int last_module = -1;
  std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();
  Table tables[kTables];
  Levels levels;
  Map<TensorImpl *, Seen> known;
  Map<Memory, TensorImpl *, HashOfMemory> by_memory;
  Map<StorageImpl *, int64_t> writers;  // the operator that wrote last; from kUnwritten down: nobody has, since it was taken
  Map<StorageImpl *, Unwritten> unwritten;
  std::unordered_map<std::vector<int64_t>, int, HashOfNumbers> layouts;
  Map<int64_t, int> looks;  // by layout, device and requires_grad
  Map<TensorImpl *, Role> roles;
  Map<const void *, TensorImpl *> roles_at;          // by address: `.data` is the parameter, too
  Map<Memory, int64_t, HashOfMemory> sent;           // gradients of this pass: the operator
  Map<TensorImpl *, int64_t> sent_to;                // of leaves whose gradient is converted on its way to them; -2: several
  std::vector<Parameter> parameters;
  std::vector<Block> blocks;
  Map<StorageImpl *, int64_t> present;  // storages that are blocks
  Map<StorageImpl *, bool> of_model;    // those of parameters and buffers
  std::unordered_map<uint64_t, std::vector<Made>> calls;  // by thread: sums of gradients say whose they are
  int64_t block_count = 0, anew = 0, member_names = 0;
  int64_t shown = 0, hidden = 0;  // bytes of blocks that are there; of what else the allocator has handed out
  size_t clean_at = kDeadTensors, since_sweep = 0;
  int64_t forgotten = 0;  // tensors before this one may have been written to since
  int64_t remembered = 256;  // tensors after one that has ended, until nobody asks for what it held
  std::vector<int64_t> key;  // of the tensor that is looked up now

  // Something went wrong in a backward pass; `name` is the operator's, or -1.
  void tell(int name, PyObject *error) {
    Owned number{failed == nullptr ? nullptr : PyLong_FromLong(name)};
    Owned told{number == nullptr ? nullptr : PyObject_CallFunctionObjArgs(failed, number.object, error, nullptr)};
  }

  // -- tensors ----------------------------------------------------------------------------------------------

  // A number for dtype, sizes and strides; -1 where a tensor has none. Another dtype may stand for its own.
  int layout_of(const at::Tensor &tensor, at::ScalarType dtype = at::ScalarType::Undefined) {
    if (!is_strided(tensor)) return -1;
    key.clear();
    key.push_back(int64_t(dtype == at::ScalarType::Undefined ? tensor.scalar_type() : dtype));
    key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
    key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
    auto found = layouts.find(key);
    if (found == layouts.end()) found = layouts.emplace(key, int(layouts.size())).first;
    return found->second;
  }

  Memory memory_of(const at::Tensor &tensor, int layout) {
    const void *address = layout < 0 ? nullptr : address_of(tensor);
    return address == nullptr ? Memory{} : Memory{address, layout};
  }
  Memory memory_of(const at::Tensor &tensor) { return memory_of(tensor, layout_of(tensor)); }

  int look_of(const at::Tensor &tensor, PyObject *object, int layout, at::ScalarType dtype = at::ScalarType::Undefined) {
    const auto device = tensor.device();
    levels.saw(device);
    const int64_t key = (int64_t(layout) << 24) | (int64_t(device.type()) << 16) | (int64_t(uint8_t(device.index())) << 8) |
                        int64_t(tensor.requires_grad());
    if (layout >= 0) {
      auto found = looks.find(key);
      if (found != looks.end()) return found->second;
    }
    Owned there{object != nullptr                          ? Py_NewRef(object)
                : dtype == at::ScalarType::Undefined ? checked(wrap(tensor))
                                                     : checked(wrap(tensor.to(dtype)))};
    Owned number{checked(PyObject_CallOneArg(find_look, there))};
    const int look = int(PyLong_AsLong(number));
    if (layout >= 0) looks.emplace(key, look);
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
    bool seen = at != known.end() && !at->second.tensor.expired();
    StorageImpl *storage = held.has_storage() ? held.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl() : nullptr;
    auto wrote_last = writers.find(storage);
    int64_t writer = wrote_last == writers.end() ? -1 : wrote_last->second;
    if (writer <= kUnwritten && !wrote) {
      int64_t &before = unwritten.find(storage)->second.version;
      if (before < 0) before = version;
      if (before == version) print = false;  // what happens to lie there says nothing
      else writers.erase(wrote_last), unwritten.erase(storage), writer = -1;
    }
    if (seen && at->second.version == version && !wrote) {
      const bool same_place = at->second.address == address_of(held);
      const bool is_new_member = at->second.names != member_names && becomes_member(tensor, storage);
      at->second.names = member_names;
      if (same_place && at->second.writer == writer && at->second.number >= forgotten && !is_new_member) return at->second.number;
      seen = same_place;
    }
    const int layout = layout_of(held);
    const Memory memory = memory_of(held, layout);
    if (!wrote && producer < 0 && memory.address != nullptr) {
      auto same = by_memory.find(memory);
      auto other = same == by_memory.end() ? known.end() : known.find(same->second);
      if (other != known.end() && is_there(other->second) && other->second.version == version &&
          other->second.writer == writer && other->second.number >= forgotten && !becomes_member(tensor, storage))
        return other->second.number;
    }
    if (producer < 0 && !wrote) producer = std::max<int64_t>(writer, -1);
    int64_t base = seen ? at->second.number : -1;
    if (base < 0 && tensor.is_view()) {
      auto whole = known.find(tensor._base().unsafeGetTensorImpl());
      if (whole != known.end() && !whole->second.tensor.expired()) base = whole->second.number;
    }
    if (look < 0) look = look_of(tensor, object, &tensor == &held ? layout : layout_of(tensor));  // may run Python
    const Role *role = role_of(tensor);
    if (role != nullptr && (role->kind == kParameter || role->kind == kBuffer)) is_of_the_model(held, storage, role->kind, role->module);
    const int64_t made = tensor_row(role, look, producer, output, base, role != nullptr ? role->module : module);
    known.insert_or_assign(key, Seen{weak(tensor), version, made, address_of(held), writer, weak_storage(storage), member_names});
    if (memory.address != nullptr) by_memory[memory] = key;
    if (known.size() > clean_at) clean();
    if (print) take_print(tensor, made, object);
    return made;
  }

  static WeakStorage weak_storage(StorageImpl *storage) {
    return WeakStorage(storage == nullptr ? c10::intrusive_ptr<StorageImpl>() : c10::intrusive_ptr<StorageImpl>::reclaim_copy(storage));
  }

  bool knows(const at::Tensor &tensor) const {
    auto at = known.find(tensor.unsafeGetTensorImpl());
    return at != known.end() && !at->second.tensor.expired() && at->second.version == version_of(tensor) &&
           at->second.number >= forgotten;
  }

  // Whether nobody else can have the memory of a tensor. Autograd makes new ones for what it hands on.
  bool is_there(const Seen &seen) const {
    return !seen.tensor.expired() || (tables[kTensors].all - seen.number <= remembered && !seen.storage.expired());
  }

  int64_t tensor_row(const Role *role, int look, int64_t producer, int64_t output, int64_t base, int module) {
    const int kind = role != nullptr ? role->kind : producer < 0 ? kGiven : kActivation;
    return tables[kTensors].add(uint8_t(kind), int32_t(role != nullptr ? role->name : 0), int32_t(look), int32_t(producer),
                                int16_t(std::min<int64_t>(output, 32767)), int32_t(base), int32_t(module));
  }

  void take_print(const at::Tensor &tensor, int64_t number, PyObject *object) {
    if (!prints || printer.take(tensor, number)) return;
    Owned there{object != nullptr ? Py_NewRef(object) : checked(wrap(tensor.variable_data()))};
    Owned pair{checked(Py_BuildValue("(LO)", static_cast<long long>(number), there.object))};
    if (PyList_Append(fresh, pair) < 0) throw PythonError{};
  }

  // The number of what a tensor becomes in a wider dtype, which nobody else will see: its print is that of the tensor.
  int64_t converted(const at::Tensor &tensor, at::ScalarType dtype, int64_t producer, int64_t output, int module) {
    const int look = look_of(tensor, nullptr, layout_of(tensor, dtype), dtype);
    const int64_t made = tensor_row(nullptr, look, producer, output, -1, module);
    take_print(tensor, made, nullptr);
    return made;
  }

  void clean() {
    forget_if(known, [this](const auto &entry) { return !is_there(entry.second); });
    forget_if(unwritten, [this](const auto &entry) {
      if (!entry.second.storage.expired()) return false;
      writers.erase(entry.first);
      return true;
    });
    forget_if(by_memory, [this](const auto &entry) { return known.find(entry.second) == known.end(); });
    clean_at = known.size() + known.size() / 4 + kDeadTensors;
  }

  template <typename Entries, typename Condition>
  static void forget_if(Entries &entries, Condition gone) {
    for (auto at = entries.begin(); at != entries.end();) {
      if (gone(*at)) at = entries.erase(at);
      else ++at;
    }
  }

  void name(const at::Tensor &tensor, int text, int kind, int module) {
    member_names += kind != kGradient;
    if (kind != kGradient) {  // of several modules that share it, the first one names it
      auto known_role = roles.find(tensor.unsafeGetTensorImpl());
      if (known_role != roles.end() && !known_role->second.tensor.expired() && known_role->second.kind == kind && known_role->second.module != module)
        return;
    }
    roles.insert_or_assign(tensor.unsafeGetTensorImpl(), Role{weak(tensor), text, kind, module});
    const Memory memory = memory_of(tensor);
    if (memory.address != nullptr && kind != kGradient) roles_at[memory.address] = tensor.unsafeGetTensorImpl();
    if (roles.size() > 4 * parameters.size() + kDeadTensors)
      forget_if(roles, [](const auto &entry) { return entry.second.tensor.expired(); });
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
    Level level;
    const bool changed = levels.changed(level);
    if (changed) find_frees(level.held);
    const int64_t op =
        tables[kOperators].add(int32_t(step), uint8_t(phase), int32_t(name), int32_t(module), int32_t(location),
                                  int32_t(stack), int32_t(arguments), int32_t(region), int64_t(stream), int32_t(group),
                                  int32_t(forward), double(since.count()), int32_t(0));
    if (changed) level_row(op, level);
    return op;
  }

  void edge(int64_t op, int side, int64_t place, int64_t tensor) {
    tables[kEdges].add(int32_t(op), uint8_t(side), int16_t(std::min<int64_t>(place, 32767)), int32_t(tensor));
  }

  // What the allocator has handed out since the last operator, by which code nobody saw.
  void last_level() {
    Level now;
    if (levels.changed(now)) level_row(tables[kOperators].all, now);
  }

  void level_row(int64_t op, const Level &level) { tables[kLevels].add(int32_t(op), level.held, level.top); }

  void memory_row(int64_t op, int64_t block, int64_t bytes, int kind, int module) {
    tables[kMemory].add(int32_t(op), int32_t(block), bytes, uint8_t(kind), int32_t(module));
    shown += bytes;
  }

  void allocated(int64_t op, int module, const at::Tensor &tensor, int kind) {
    if (!tensor.has_storage() || tensor.is_meta()) return;
    const auto &storage = tensor.unsafeGetTensorImpl()->storage();
    StorageImpl *key = storage.unsafeGetStorageImpl();
    if (key == nullptr || !present.emplace(key, block_count).second) return;
    const auto size = levels.counts(tensor.device()) ? int64_t(storage.nbytes()) : 0;  // of others only the end is awaited
    blocks.push_back({storage.getWeakStorageImpl(), key, block_count, size, kind, module});
    if (size != 0) memory_row(op, block_count, size, kind, module);
    ++block_count;
  }

  // Whether a tensor is a parameter or a buffer over memory that was none before (`model.to(device)`).
  bool becomes_member(const at::Tensor &tensor, StorageImpl *storage) {
    const Role *role = role_of(tensor);
    return role != nullptr && (role->kind == kParameter || role->kind == kBuffer) && of_model.find(storage) == of_model.end();
  }

  // A parameter or a buffer lies there: memory from before the trace, or that of what an operator returned (`model.to(device)`).
  void is_of_the_model(const at::Tensor &held, StorageImpl *storage, int kind, int module) {
    if (storage == nullptr || held.is_meta() || !of_model.emplace(storage, true).second) return;
    if (present.find(storage) == present.end()) return allocated(-1, module, held, kind);
    auto block = std::find_if(blocks.begin(), blocks.end(), [&](const Block &one) { return one.key == storage; });
    if (block == blocks.end()) return;
    if (block->bytes != 0) memory_row(tables[kOperators].all, block->number, -block->bytes, block->kind, block->module);
    block->number = block_count++, block->kind = kind, block->module = module;
    if (block->bytes != 0) memory_row(tables[kOperators].all, block->number, block->bytes, kind, module);
  }

  void takes_anew(StorageImpl *storage, int64_t version) {
    writers[storage] = kUnwritten - ++anew;
    unwritten.insert_or_assign(storage, Unwritten{version, weak_storage(storage)});
  }

  // A storage has another size now, and other memory: FSDP gives that of parameters back and takes it again.
  void resized(StorageImpl *storage, int64_t bytes) {
    takes_anew(storage, -1);
    if (present.find(storage) == present.end()) return;
    auto block = std::find_if(blocks.begin(), blocks.end(), [&](const Block &one) { return one.key == storage; });
    if (block == blocks.end()) return;
    if (block->bytes != 0) memory_row(tables[kOperators].all, block->number, -block->bytes, block->kind, block->module);
    block->number = block_count++;
    block->bytes = bytes;
    if (bytes != 0) memory_row(tables[kOperators].all, block->number, bytes, block->kind, block->module);
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
      if (block.bytes != 0) memory_row(tables[kOperators].all, block.number, -block.bytes, block.kind, block.module);
      present.erase(block.key);
      writers.erase(block.key);
      unwritten.erase(block.key);
      of_model.erase(block.key);
    }
    blocks.erase(blocks.begin() + long(kept), blocks.end());
  }

  // The allocator has got back more than what is known to be gone: look for the rest, unless it is little.
  void find_frees(int64_t held) {
    if (held - shown < hidden - held / 32) {
      write_frees(true);
      hidden = held - shown;
    }
    hidden = std::max(hidden, held - shown);
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
      if (!knows(grad)) {
        auto from = sent.find(memory_of(grad));
        auto to = sent_to.find(locked.get());
        const int64_t known_sender = from != sent.end() ? from->second : to != sent_to.end() ? to->second : -1;
        const int64_t producer = known_sender < 0 ? function : known_sender;
        const int64_t made = number(grad, grad, nullptr, -1, producer, int64_t(place), -1, true, true);
        if (producer == function && function >= 0) edge(function, kOutput, int64_t(place), made);
      }
      allocated(tables[kOperators].all - 1, module, grad, kGradient);
    }
    sent.clear();
    sent_to.clear();
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
