// Which tensors have been measured in their present version, and the log of calls: numbers of the tensors that went into
// each and came out of it, forward and backward. The overflow check asks this for every tensor of every call.
// `native/ledger.py` has the twin in Python, which runs until this is compiled or where it cannot be, and says what each
// method is for.

#include "call_backward.h"

#include <structmember.h>

namespace {

// -- one launch for many tensors ----------------------------------------------------------------------------

// As in statistics.cu and trace_prints.cu; all of it is the kernel's one parameter.
constexpr int kMaxEntries = 32, kThreads = 256;
struct TableEntry {
  int64_t data, numel, share, first, inner, step, kind;
};
struct Table {
  int64_t count, rows;
  TableEntry entries[kMaxEntries];
};

// Which of the kernel's ways of reading a dtype takes, -1 for none.
int kind_of_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16: return 0;
    case at::kHalf: return 1;
    case at::kFloat: return 2;
    case at::kDouble: return 3;
    default: return -1;
  }
}

// Elements that lie as `numel / inner` stretches of `inner`, `step` elements apart, in whichever order.
struct Layout {
  int64_t numel = 0, inner = 0, step = 0;
  bool is_dense() const { return inner == numel; }
};

bool laid_out(const at::Tensor &tensor, Layout &layout) {
  layout.numel = tensor.numel();
  if (tensor.is_contiguous()) {
    layout.inner = layout.step = layout.numel;
    return true;
  }
  c10::SmallVector<std::pair<int64_t, int64_t>, 8> dims;  // stride and size
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) != 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  std::sort(dims.begin(), dims.end());
  size_t at = 0;
  layout.inner = 1;
  for (; at < dims.size() && dims[at].first == layout.inner; ++at) layout.inner *= dims[at].second;
  layout.step = layout.inner;
  if (at < dims.size()) {
    layout.step = dims[at].first;
    int64_t reach = dims[at].first * dims[at].second;
    for (++at; at < dims.size(); reach *= dims[at].second, ++at)
      if (dims[at].first != reach) return false;
  }
  return layout.step >= 0;
}

struct Fresh {  // a tensor that has not been measured
  int64_t number;
  at::Tensor tensor;
  PyObject *object;  // borrowed, or null
};

// Rows of partial results on one GPU; `native/statistics.py` and `trace/device_prints.py` send them to the host.
struct Rows {
  LaunchKernel launch_kernel = nullptr;
  void *function = nullptr;
  Streams streams;
  int64_t address = 0, row_bytes = 0, capacity = 0, used = 0;
  int64_t share = 0, programs = 0;  // elements of one block at least, blocks of one tensor at most
  std::vector<int64_t> numbers, numels, starts, used_streams;
  ~Rows() { Py_CLEAR(streams.raw_stream); }

  bool full() const { return used > capacity - programs; }

  // Fill an entry; false where the kernel cannot read the tensor as it is.
  bool enter(const at::Tensor &tensor, TableEntry &entry) const {
    const auto device = tensor.device();
    if (device.type() != streams.type || device.index() != streams.index || !is_strided(tensor) || tensor.is_neg()) return false;
    if (tensor.key_set().has(c10::DispatchKey::Python)) return false;
    const int kind = kind_of_dtype(tensor.scalar_type());
    Layout lies;
    if (kind < 0 || !laid_out(tensor, lies) || lies.numel == 0) return false;
    const void *data = address_of(tensor);
    entry = {reinterpret_cast<int64_t>(data), lies.numel, 0, 0, lies.inner, lies.step, kind};
    return data != nullptr;
  }

  // Start measuring tensors; what cannot be measured here, or has no room, is left.
  std::vector<Fresh> measure(const std::vector<Fresh> &fresh) {
    std::vector<Fresh> left;
    const OnDevice here(streams.type, streams.index);
    Table table;
    table.count = 0;
    int64_t blocks = 0;
    for (const Fresh &one : fresh) {
      TableEntry &entry = table.entries[table.count];
      if (!enter(one.tensor, entry)) {
        left.push_back(one);
        continue;
      }
      int64_t own = std::min((entry.numel + share - 1) / share, programs);
      if (used + blocks + own > capacity) {
        left.push_back(one);
        continue;
      }
      entry.share = (entry.numel + own - 1) / own;
      entry.share = (entry.share + 7) / 8 * 8;  // each begins where 16 bytes can be read at once, if the tensor does
      own = (entry.numel + entry.share - 1) / entry.share;
      entry.first = blocks;
      numbers.push_back(one.number);
      numels.push_back(entry.numel);
      starts.push_back(used + blocks);
      blocks += own;
      if (++table.count == kMaxEntries) launch(table, blocks);
    }
    if (table.count > 0) launch(table, blocks);
    return left;
  }

  void launch(Table &table, int64_t &blocks) {
    const int64_t raw = streams.now();
    if (std::find(used_streams.begin(), used_streams.end(), raw) == used_streams.end()) used_streams.push_back(raw);
    table.rows = address + row_bytes * used;
    void *parameters[] = {&table};
    const int error = launch_kernel(function, unsigned(blocks), 1, 1, kThreads, 1, 1, 0, reinterpret_cast<void *>(raw), parameters,
                                    nullptr);
    if (error != 0) {
      for (auto *column : {&numbers, &numels, &starts}) column->resize(column->size() - size_t(table.count));
      throw std::runtime_error("cuLaunchKernel: error " + std::to_string(error));
    }
    used += blocks;
    blocks = table.count = 0;
  }
};

struct RowsObject {
  PyObject_HEAD
  Rows *rows;
};
Rows &rows_of(PyObject *self) { return *reinterpret_cast<RowsObject *>(self)->rows; }
PyTypeObject *rows_type = nullptr;

// -- what is known of tensors -------------------------------------------------------------------------------

constexpr size_t kMaxWaiting = 1024;   // calls of the log
constexpr size_t kDeadTensors = 256;  // that may be remembered: as long as they are, PyTorch cannot use their memory again
constexpr int64_t kNotMeasured = -1;   // nobody has written to the tensor yet

struct Measured {
  WeakTensor tensor;
  int64_t version, number;
};

using Pairs = c10::SmallVector<int64_t, 12>;  // the place of a tensor and its number, in turns

struct Ledger {
  PyObject *measure = nullptr, *due = nullptr, *failed = nullptr;  // functions of the tool
  PyObject *rows = nullptr;   // that tensors are measured into, or null
  PyObject *calls = nullptr;  // a list: of each call of the log what Python gave, or None
  Map<TensorImpl *, Measured> known;
  std::vector<int64_t> log, steps;
  int64_t numbers = 0;  // the next one
  Py_ssize_t reused = 0;
  size_t clean_at = kDeadTensors;
  bool closed = false;

  void forget() {
    for (PyObject **one : {&measure, &due, &failed, &rows, &calls}) Py_CLEAR(*one);
  }

  // The number of a tensor in the version that another one has, -2 where it has none.
  int64_t number_of(TensorImpl *tensor, int64_t version) const {
    auto found = known.find(tensor);
    if (found == known.end() || found->second.tensor.expired() || found->second.version != version) return -2;
    return found->second.number;
  }

  // The number of what a view looks at, where that is all of it in another order.
  int64_t number_of_base(const at::Tensor &view, int64_t version) const {
    if (!view.is_view()) return -2;
    const at::Tensor base{view._base()};
    const int64_t number = number_of(base.unsafeGetTensorImpl(), version);
    if (number < 0 || !is_strided(view) || !is_strided(base) || view.numel() != base.numel()) return -2;
    if (view.scalar_type() != base.scalar_type() || view.is_neg() || view.is_conj()) return -2;
    Layout mine, whole;
    if (!laid_out(view, mine) || !laid_out(base, whole) || !mine.is_dense() || !whole.is_dense()) return -2;
    return address_of(view) == address_of(base) ? number : -2;
  }

  void remember(const at::Tensor &tensor, int64_t version, int64_t number) {
    if (tensor.is_inference()) return;  // those count no versions
    known.insert_or_assign(tensor.unsafeGetTensorImpl(), Measured{weak(tensor), version, number});
    if (known.size() <= clean_at) return;
    for (auto at = known.begin(); at != known.end();) {
      if (at->second.tensor.expired()) at = known.erase(at);
      else ++at;
    }
    clean_at = known.size() + known.size() / 4 + kDeadTensors;
  }

  // Places and numbers of tensors; undefined ones have none. `objects` are the same in Python, or null.
  Pairs look(SomeTensors tensors, PyObject *objects) {
    Pairs pairs;
    if (closed) return pairs;  // the tool has stopped while a call or a backward pass was under way
    std::vector<Fresh> fresh;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor &tensor = tensors[i];
      if (!tensor.defined()) continue;
      const int64_t version = version_of(tensor);
      int64_t number = number_of(tensor.unsafeGetTensorImpl(), version);
      if (number == kNotMeasured) continue;
      if (number < 0) {
        const bool floating = at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type());
        if (!floating || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.numel() == 0) continue;
        number = number_of_base(tensor, version);
        if (number < 0) {
          number = numbers++;
          remember(tensor, version, number);
          fresh.push_back({number, tensor, objects == nullptr ? nullptr : PyList_GET_ITEM(objects, Py_ssize_t(i))});
          pairs.insert(pairs.end(), {int64_t(i), number});
          continue;
        }
      }
      ++reused;
      pairs.insert(pairs.end(), {int64_t(i), number});
    }
    if (!fresh.empty()) measure_all(fresh, pairs);
    return pairs;
  }

  void measure_all(std::vector<Fresh> &fresh, Pairs &pairs) {
    if (rows != nullptr) {
      Owned held{Py_NewRef(rows)};
      fresh = rows_of(held).measure(fresh);
    }
    if (fresh.empty()) return;
    Owned tensors{checked(PyList_New(0))}, given{checked(PyList_New(0))};
    for (const Fresh &one : fresh) {
      Owned tensor{one.object != nullptr ? Py_NewRef(one.object) : checked(wrap(one.tensor.variable_data()))};
      Owned number{checked(PyLong_FromLongLong(one.number))};
      if (PyList_Append(tensors, tensor) < 0 || PyList_Append(given, number) < 0) throw PythonError{};
    }
    Owned done{measure == nullptr ? nullptr : PyObject_CallFunctionObjArgs(measure, tensors.object, given.object, nullptr)};
    const bool failed = done == nullptr || !PyList_Check(done.object) || size_t(PyList_GET_SIZE(done.object)) != fresh.size();
    for (size_t i = 0; i < fresh.size(); ++i) {
      if (!failed && PyList_GET_ITEM(done.object, Py_ssize_t(i)) == Py_True) continue;
      auto at = known.find(fresh[i].tensor.unsafeGetTensorImpl());
      if (at != known.end() && at->second.number == fresh[i].number) known.erase(at);
      for (size_t place = 0; place < pairs.size();) {
        if (pairs[place + 1] != fresh[i].number) place += 2;
        else pairs.erase(pairs.begin() + place, pairs.begin() + place + 2);
      }
    }
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "measure must return a list of as many");
    if (failed) throw PythonError{};
  }

  void enter(int64_t id, int64_t site, bool backward, int64_t step, const Pairs &arriving, const Pairs &leaving, PyObject *call) {
    if (closed || (arriving.empty() && leaving.empty())) return;
    if (PyList_Append(calls, call) < 0) throw PythonError{};
    steps.push_back(step);
    log.insert(log.end(), {id, site, int64_t(backward), int64_t((arriving.size() + leaving.size()) / 2)});
    for (const Pairs *side : {&arriving, &leaving})
      for (size_t i = 0; i < side->size(); i += 2) log.insert(log.end(), {int64_t(side == &leaving), (*side)[i], (*side)[i + 1]});
    if (steps.size() >= kMaxWaiting || (rows != nullptr && rows_of(rows).full())) Owned{checked(PyObject_CallNoArgs(due))};
  }
};

struct LedgerObject {
  PyObject_HEAD
  Ledger *ledger;
};
Ledger &ledger_of(PyObject *self) { return *reinterpret_cast<LedgerObject *>(self)->ledger; }

// -- calls without Python: `front_light.h` calls these around each -------------------------------------------

struct LoggedCall : public AwaitedCall {
  PyObject *object;  // the ledger
  int64_t id, site, step;
  LoggedCall(PyObject *ledger, int64_t id, int64_t site, int64_t step) : object(Py_NewRef(ledger)), id(id), site(site), step(step) {}
  ~LoggedCall() override {
    if (!Py_IsInitialized()) return;
    const auto gil = PyGILState_Ensure();
    Py_DECREF(object);
    PyGILState_Release(gil);
  }

  void told(SomeTensors outputs, SomeTensors inputs, c10::ArrayRef<Wider>) override {
    Ledger &ledger = ledger_of(object);
    if (ledger.closed) return;
    const Pairs arriving = ledger.look(outputs, nullptr);
    ledger.enter(id, site, true, step, arriving, ledger.look(inputs, nullptr), Py_None);
  }

  void failed(PyObject *error) override {
    PyObject *tell = ledger_of(object).failed;
    Owned number{tell == nullptr ? nullptr : PyLong_FromLongLong(site)};
    Owned told{number == nullptr ? nullptr : PyObject_CallFunctionObjArgs(tell, number.object, error, nullptr)};
  }
};

PyObject *ledger_begin(PyObject *self, PyObject *tensors) {
  return safely([&]() -> PyObject * {
    if (ledger_of(self).closed) Py_RETURN_NONE;
    return begin_call(tensors);
  });
}

Tensors all_unwrapped(PyObject *tensors) {
  Tensors found(size_t(PyList_GET_SIZE(tensors)));
  for (size_t i = 0; i < found.size(); ++i) {
    PyObject *one = PyList_GET_ITEM(tensors, Py_ssize_t(i));
    if (one != Py_None) found[i] = unwrapped(one);
  }
  return found;
}

// (begun, inputs, results, step, id, site, whether the results may be views): a call has run; `inputs` are the tensors of
// `begin`. What lies in an argument's memory has been looked at there; `to`, `reshape` and others give a view or a copy.
PyObject *ledger_end(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count != 7) {
    PyErr_SetString(PyExc_TypeError, "end takes seven arguments");
    return nullptr;
  }
  return safely([&]() -> PyObject * {
    Ledger &ledger = ledger_of(self);
    const Begun &begun = begun_in(given[0]);
    const Tensors outputs = all_unwrapped(given[2]);
    const int64_t step = PyLong_AsLongLong(given[3]), id = PyLong_AsLongLong(given[4]), site = PyLong_AsLongLong(given[5]);
    if (PyErr_Occurred()) throw PythonError{};
    const Pairs arriving = ledger.look(begun.inputs, given[1]);
    Tensors fresh = outputs;
    for (at::Tensor &one : fresh)
      if (given[6] == Py_True && one.defined() && one.is_view()) one.reset();
    const Pairs leaving = ledger.look(fresh, given[2]);
    ledger.enter(id, site, false, step, arriving, leaving, Py_None);
    if (at::GradMode::is_enabled() && !outputs.empty())
      attach(std::make_shared<LoggedCall>(self, id, site, step), begun.inputs, outputs, begun.since);
    Py_RETURN_NONE;
  });
}

// -- methods ------------------------------------------------------------------------------------------------

PyObject *ledger_look(PyObject *self, PyObject *tensors) {
  if (!PyList_Check(tensors)) {
    PyErr_SetString(PyExc_TypeError, "look takes a list");
    return nullptr;
  }
  return safely([&]() -> PyObject * {
    const Pairs pairs = ledger_of(self).look(all_unwrapped(tensors), tensors);
    PyObject *made = checked(PyTuple_New(Py_ssize_t(pairs.size())));
    for (size_t i = 0; i < pairs.size(); ++i) PyTuple_SET_ITEM(made, Py_ssize_t(i), PyLong_FromLongLong(pairs[i]));
    return made;
  });
}

Pairs pairs_in(PyObject *numbers) {
  Pairs pairs;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(numbers); ++i) pairs.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, i)));
  if (PyErr_Occurred()) throw PythonError{};
  return pairs;
}

// (id, site, whether it is the backward, step, arriving, leaving, call)
PyObject *ledger_enter(PyObject *self, PyObject *args) {
  long long id, site, step;
  int backward;
  PyObject *arriving, *leaving, *call;
  if (!PyArg_ParseTuple(args, "LLpLO!O!O", &id, &site, &backward, &step, &PyTuple_Type, &arriving, &PyTuple_Type, &leaving, &call))
    return nullptr;
  return safely([&]() -> PyObject * {
    ledger_of(self).enter(id, site, backward, step, pairs_in(arriving), pairs_in(leaving), call);
    Py_RETURN_NONE;
  });
}

PyObject *ledger_take(PyObject *self, PyObject *) {
  Ledger &ledger = ledger_of(self);
  PyObject *empty = PyList_New(0);
  if (empty == nullptr) return nullptr;
  // All three at once: what follows may run Python, which may log a call.
  std::vector<int64_t> numbers, of_calls;
  numbers.swap(ledger.log);
  of_calls.swap(ledger.steps);
  Owned calls{std::exchange(ledger.calls, empty)};
  Owned log{bytes_of(numbers, numbers.size())}, steps{bytes_of(of_calls, of_calls.size())};
  return log == nullptr || steps == nullptr ? nullptr : PyTuple_Pack(3, log.object, steps.object, calls.object);
}

PyObject *ledger_leave_alone(PyObject *self, PyObject *tensors) {
  return safely([&]() -> PyObject * {
    for (const at::Tensor &tensor : all_unwrapped(tensors)) ledger_of(self).remember(tensor, version_of(tensor), kNotMeasured);
    Py_RETURN_NONE;
  });
}

PyObject *ledger_clear(PyObject *self, PyObject *) {
  ledger_of(self).known.clear();
  Py_RETURN_NONE;
}

PyObject *ledger_close(PyObject *self, PyObject *) {
  Ledger &ledger = ledger_of(self);
  ledger.closed = true;
  ledger.known.clear();
  for (PyObject **one : {&ledger.measure, &ledger.due, &ledger.failed, &ledger.rows}) Py_CLEAR(*one);  // the tool holds the ledger
  Py_RETURN_NONE;
}

PyObject *ledger_use(PyObject *self, PyObject *rows) {
  if (rows != Py_None && Py_TYPE(rows) != rows_type) {
    PyErr_SetString(PyExc_TypeError, "use takes rows or None");
    return nullptr;
  }
  Py_XSETREF(ledger_of(self).rows, rows == Py_None ? nullptr : Py_NewRef(rows));
  Py_RETURN_NONE;
}

// (measure, due, failed, the first number)
PyObject *new_ledger(PyTypeObject *type, PyObject *args, PyObject *) {
  PyObject *parts[3];
  long long first;
  if (!PyArg_ParseTuple(args, "OOOL", &parts[0], &parts[1], &parts[2], &first)) return nullptr;
  PyObject *calls = PyList_New(0);
  auto *made = calls == nullptr ? nullptr : reinterpret_cast<LedgerObject *>(type->tp_alloc(type, 0));
  if (made == nullptr) {
    Py_XDECREF(calls);
    return nullptr;
  }
  made->ledger = new Ledger();
  PyObject **places[] = {&made->ledger->measure, &made->ledger->due, &made->ledger->failed};
  for (int i = 0; i < 3; ++i) *places[i] = Py_NewRef(parts[i]);
  made->ledger->calls = calls;
  made->ledger->numbers = first;
  return reinterpret_cast<PyObject *>(made);
}

void free_ledger(PyObject *self) {
  Ledger *ledger = &ledger_of(self);
  ledger->forget();
  delete ledger;
  PyTypeObject *type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject *get_reused(PyObject *self, void *) { return PyLong_FromSsize_t(ledger_of(self).reused); }

#define METHOD(of, name, flags) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(of##_##name)), flags, nullptr}
PyMethodDef ledger_methods[] = {METHOD(ledger, look, METH_O),        METHOD(ledger, enter, METH_VARARGS),
                                METHOD(ledger, take, METH_NOARGS),   METHOD(ledger, leave_alone, METH_O),
                                METHOD(ledger, clear, METH_NOARGS),  METHOD(ledger, close, METH_NOARGS),
                                METHOD(ledger, use, METH_O),         METHOD(ledger, begin, METH_O),
                                METHOD(ledger, end, METH_FASTCALL),  {nullptr, nullptr, 0, nullptr}};
PyGetSetDef ledger_members[] = {{"reused", get_reused, nullptr, nullptr, nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot ledger_slots[] = {{Py_tp_new, reinterpret_cast<void *>(new_ledger)},
                              {Py_tp_dealloc, reinterpret_cast<void *>(free_ledger)},
                              {Py_tp_methods, ledger_methods},
                              {Py_tp_getset, ledger_members},
                              {0, nullptr}};
PyType_Spec ledger_spec = {"op_tools_ledger.Ledger", sizeof(LedgerObject), 0, Py_TPFLAGS_DEFAULT, ledger_slots};

// (tensors, numbers): start measuring; which of them were taken.
PyObject *rows_measure(PyObject *self, PyObject *args) {
  PyObject *tensors, *numbers;
  if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &tensors, &PyList_Type, &numbers)) return nullptr;
  return safely([&]() -> PyObject * {
    std::vector<Fresh> fresh;
    const Tensors all = all_unwrapped(tensors);
    for (size_t i = 0; i < all.size() && Py_ssize_t(i) < PyList_GET_SIZE(numbers); ++i)
      fresh.push_back({PyLong_AsLongLong(PyList_GET_ITEM(numbers, Py_ssize_t(i))), all[i], nullptr});
    if (PyErr_Occurred()) throw PythonError{};
    const std::vector<Fresh> left = rows_of(self).measure(fresh);
    PyObject *taken = checked(PyList_New(Py_ssize_t(fresh.size())));
    size_t next = 0;
    for (size_t i = 0; i < fresh.size(); ++i) {
      const bool is_left = next < left.size() && left[next].number == fresh[i].number;
      next += is_left;
      PyList_SET_ITEM(taken, Py_ssize_t(i), PyBool_FromLong(!is_left));
    }
    return taken;
  });
}

// The tensors whose rows are on the device: their numbers, elements, first rows and the end, and the streams that were used.
PyObject *rows_take(PyObject *self, PyObject *) {
  Rows &rows = rows_of(self);
  rows.starts.push_back(rows.used);
  Owned numbers{bytes_of(rows.numbers, rows.numbers.size())}, numels{bytes_of(rows.numels, rows.numels.size())};
  Owned starts{bytes_of(rows.starts, rows.starts.size())}, streams{bytes_of(rows.used_streams, rows.used_streams.size())};
  for (auto *column : {&rows.numbers, &rows.numels, &rows.starts, &rows.used_streams}) column->clear();
  rows.used = 0;
  if (numbers == nullptr || numels == nullptr || starts == nullptr || streams == nullptr) return nullptr;
  return PyTuple_Pack(4, numbers.object, numels.object, starts.object, streams.object);
}

// (launch, function, bytes of a row, device, rows, capacity, elements of a block at least, blocks of a tensor at most, stream of a device)
PyObject *new_rows(PyTypeObject *type, PyObject *args, PyObject *) {
  unsigned long long launch, function, address;
  const char *device;
  long long row_bytes, capacity, share, programs;
  PyObject *stream;
  if (!PyArg_ParseTuple(args, "KKLsKLLLO", &launch, &function, &row_bytes, &device, &address, &capacity, &share, &programs, &stream))
    return nullptr;
  return safely([&]() -> PyObject * {
    const c10::Device there{std::string(device)};
    auto *made = reinterpret_cast<RowsObject *>(checked(type->tp_alloc(type, 0)));
    made->rows = new Rows();
    Rows &rows = *made->rows;
    rows.launch_kernel = reinterpret_cast<LaunchKernel>(launch);
    rows.function = reinterpret_cast<void *>(function);
    rows.streams.type = there.type();
    rows.streams.index = there.index();
    rows.streams.raw_stream = Py_NewRef(stream);
    rows.address = int64_t(address);
    rows.row_bytes = row_bytes;
    rows.capacity = capacity;
    rows.share = share;
    rows.programs = programs;
    return reinterpret_cast<PyObject *>(made);
  });
}

void free_rows(PyObject *self) {
  delete &rows_of(self);
  PyTypeObject *type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject *get_full(PyObject *self, void *) { return PyBool_FromLong(rows_of(self).full()); }
PyMethodDef rows_methods[] = {METHOD(rows, measure, METH_VARARGS), METHOD(rows, take, METH_NOARGS), {nullptr, nullptr, 0, nullptr}};
#undef METHOD
PyGetSetDef rows_members[] = {{"full", get_full, nullptr, nullptr, nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot rows_slots[] = {{Py_tp_new, reinterpret_cast<void *>(new_rows)},
                            {Py_tp_dealloc, reinterpret_cast<void *>(free_rows)},
                            {Py_tp_methods, rows_methods},
                            {Py_tp_getset, rows_members},
                            {0, nullptr}};
PyType_Spec rows_spec = {"op_tools_ledger.Rows", sizeof(RowsObject), 0, Py_TPFLAGS_DEFAULT, rows_slots};

// (names of nodes that only move or convert a gradient)
PyObject *set_up(PyObject *, PyObject *names) {
  if (!PyTuple_Check(names)) {
    PyErr_SetString(PyExc_TypeError, "set_up takes a tuple of names");
    return nullptr;
  }
  set_passing(names);
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {{"set_types", set_types, METH_VARARGS, nullptr},
                           {"set_up", set_up, METH_O, nullptr},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "op_tools_ledger", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject *PyInit_op_tools_ledger() {
  PyObject *module = PyModule_Create(&definition);
  struct {
    const char *name;
    PyType_Spec *spec;
  } types[] = {{"Ledger", &ledger_spec}, {"Rows", &rows_spec}};
  for (auto &[name, spec] : types) {
    PyObject *type = module == nullptr ? nullptr : PyType_FromSpec(spec);
    if (spec == &rows_spec) rows_type = reinterpret_cast<PyTypeObject *>(type);
    if (type != nullptr && PyModule_AddObject(module, name, type) == 0) continue;
    Py_XDECREF(type);
    Py_CLEAR(module);
  }
  return module;
}
