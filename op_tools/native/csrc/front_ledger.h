// Which tensors have been measured in their present version, and one launch for those that have not: the overflow check
// asks this for every tensor of every call. `native/ledger.py` has the twin in Python. Included by front.cpp.

PyObject *get_version, *get_base, *get_is_cuda, *call_numel, *call_is_view, *call_is_neg, *call_get_device;
PyObject *kinds_of_dtypes = nullptr;  // floating and complex dtypes: which kernel reads them, -1 for none
PyObject *strided_layout = nullptr;

constexpr int kMaxDims = 64;

// Numbers of a tensor; false where one of them cannot be had, and the error is cleared.
bool asked(PyObject *method, PyObject *tensor, long long &number) {
  Owned found{PyObject_CallOneArg(method, tensor)};
  number = found == nullptr ? -1 : PyLong_AsLongLong(found);
  const bool failed = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  return !failed;
}

bool version_of(PyObject *tensor, long long &version) {
  Owned found{got(get_version, tensor)};  // inference tensors have none
  version = found == nullptr ? -1 : PyLong_AsLongLong(found);
  const bool failed = PyErr_Occurred() != nullptr;
  PyErr_Clear();
  return !failed;
}

// Elements that lie as `numel / inner` stretches of `inner`, `step` elements apart, in whichever order.
struct Layout {
  long long numel = 0, inner = 0, step = 0;
};

bool laid_out(PyObject *tensor, Layout &layout) {
  Owned shape{got(get_shape, tensor)}, strides{PyObject_CallOneArg(call_stride, tensor)};
  if (shape == nullptr || strides == nullptr || !PyTuple_Check(strides.object)) {
    PyErr_Clear();
    return false;
  }
  long long sizes[kMaxDims], steps[kMaxDims];
  int count = 0;
  layout.numel = 1;
  const Py_ssize_t dims = PyTuple_GET_SIZE(shape.object);
  if (dims > kMaxDims || PyTuple_GET_SIZE(strides.object) != dims) return false;
  for (Py_ssize_t i = 0; i < dims; ++i) {
    const long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.object, i));
    const long long step = PyLong_AsLongLong(PyTuple_GET_ITEM(strides.object, i));
    if (PyErr_Occurred()) {  // symbols
      PyErr_Clear();
      return false;
    }
    layout.numel *= size;
    if (size == 1) continue;
    int at = count++;
    for (; at > 0 && steps[at - 1] > step; --at) {
      sizes[at] = sizes[at - 1];
      steps[at] = steps[at - 1];
    }
    sizes[at] = size;
    steps[at] = step;
  }
  int at = 0;
  layout.inner = 1;
  for (; at < count && steps[at] == layout.inner; ++at) layout.inner *= sizes[at];
  layout.step = layout.inner;
  if (at < count) {
    layout.step = steps[at];
    long long reach = steps[at] * sizes[at];
    for (++at; at < count; reach *= sizes[at], ++at)
      if (steps[at] != reach) return false;
  }
  return layout.step >= 0;
}

// -- what is known of tensors -------------------------------------------------------------------------------

struct Measured {
  PyObject *reference, *measure;  // a weak reference; None where nobody has written to the tensor yet
  long long version;
};

struct Ledger {
  PyObject_HEAD
  std::unordered_map<PyObject *, Measured> *known;
  Py_ssize_t reused;
  size_t clean_at;
};

bool is_alive(PyObject *reference, PyObject *tensor) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject *found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) PyErr_Clear();
  const bool same = tensor == nullptr ? found != nullptr : found == tensor;
  Py_XDECREF(found);
  return same;
#else
  PyObject *found = PyWeakref_GetObject(reference);
  return tensor == nullptr ? found != Py_None : found == tensor;
#endif
}

void forget_all(Ledger *ledger, bool only_dead) {
  std::vector<Measured> gone;
  for (auto at = ledger->known->begin(); at != ledger->known->end();) {
    if (only_dead && is_alive(at->second.reference, nullptr)) {
      ++at;
    } else {
      gone.push_back(at->second);
      at = ledger->known->erase(at);
    }
  }
  for (auto &one : gone) {
    Py_DECREF(one.reference);
    Py_DECREF(one.measure);
  }
}

bool remember(Ledger *ledger, PyObject *tensor, PyObject *measure) {
  long long version;
  if (!version_of(tensor, version)) return true;
  PyObject *reference = PyWeakref_NewRef(tensor, nullptr);
  if (reference == nullptr) return false;
  auto &place = (*ledger->known)[tensor];
  Measured old = place;
  place = {reference, Py_NewRef(measure), version};
  Py_XDECREF(old.reference);
  Py_XDECREF(old.measure);
  if (ledger->known->size() > ledger->clean_at) {
    forget_all(ledger, true);
    ledger->clean_at = 2 * ledger->known->size() + 1024;
  }
  return true;
}

// The measure of a tensor in its present version, borrowed; a null pointer where there is none.
PyObject *known_measure(Ledger *ledger, PyObject *tensor, PyObject *asker) {
  auto found = ledger->known->find(tensor);
  long long version;
  if (found == ledger->known->end() || !is_alive(found->second.reference, tensor)) return nullptr;
  return version_of(asker, version) && version == found->second.version ? found->second.measure : nullptr;
}

// The measure of what a view looks at, where that is all of it in another order; borrowed.
PyObject *measure_of_base(Ledger *ledger, PyObject *view) {
  Owned is_view{PyObject_CallOneArg(call_is_view, view)};
  Owned base{is_view == Py_True ? got(get_base, view) : nullptr};
  PyObject *found = base == nullptr || base == Py_None ? nullptr : known_measure(ledger, base, view);
  PyErr_Clear();
  if (found == nullptr || found == Py_None) return nullptr;
  Layout mine, whole;
  long long here, there;
  if (!laid_out(view, mine) || !laid_out(base, whole) || mine.numel != whole.numel) return nullptr;
  if (mine.inner != mine.numel || whole.inner != whole.numel) return nullptr;
  if (!asked(call_data_ptr, view, here) || !asked(call_data_ptr, base, there) || here != there) return nullptr;
  Owned one{got(get_dtype, view)}, other{got(get_dtype, base)}, negated{PyObject_CallOneArg(call_is_neg, view)};
  PyErr_Clear();
  return one == other.object && negated == Py_False ? found : nullptr;
}

// (tensors, measure): numbers of the tensors and their measures, in turns. What has none in its present version is given
// to `measure` as one list, which returns as many measures or None.
PyObject *look(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  auto *ledger = reinterpret_cast<Ledger *>(self);
  if (count != 2 || !PyList_Check(given[0])) {
    PyErr_SetString(PyExc_TypeError, "look takes a list and a function");
    return nullptr;
  }
  PyObject *tensors = given[0];
  const Py_ssize_t size = PyList_GET_SIZE(tensors);
  std::vector<PyObject *> measures(size, nullptr);  // strong references
  std::vector<std::pair<Py_ssize_t, Py_ssize_t>> places;  // of tensors that are new, and where they are in `fresh`
  Owned fresh{PyList_New(0)};
  bool failed = fresh == nullptr;
  for (Py_ssize_t i = 0; i < size && !failed; ++i) {
    PyObject *tensor = PyList_GET_ITEM(tensors, i);
    if (tensor == Py_None) continue;
    if (PyObject *measure = known_measure(ledger, tensor, tensor)) {
      measures[i] = Py_NewRef(measure);
      ledger->reused += measure != Py_None;
      continue;
    }
    Owned dtype{got(get_dtype, tensor)};
    if (dtype == nullptr || PyDict_GetItemWithError(kinds_of_dtypes, dtype) == nullptr) {
      failed = PyErr_Occurred() != nullptr;
      continue;
    }
    long long numel;
    if (!asked(call_numel, tensor, numel) || numel == 0) continue;
    if (PyObject *measure = measure_of_base(ledger, tensor)) {
      measures[i] = Py_NewRef(measure);
      ++ledger->reused;
      continue;
    }
    Py_ssize_t at = 0;
    const Py_ssize_t others = PyList_GET_SIZE(fresh.object);
    while (at < others && PyList_GET_ITEM(fresh.object, at) != tensor) ++at;
    if (at == others) {
      failed = PyList_Append(fresh, tensor) < 0;
    } else {
      ++ledger->reused;
    }
    places.push_back({i, at});
  }
  if (!failed && !places.empty()) {
    Owned made{PyObject_CallOneArg(given[1], fresh)};
    const Py_ssize_t others = PyList_GET_SIZE(fresh.object);
    failed = made == nullptr || !PyList_Check(made.object) || PyList_GET_SIZE(made.object) != others;
    for (Py_ssize_t at = 0; at < others && !failed; ++at) {
      PyObject *measure = PyList_GET_ITEM(made.object, at);
      if (measure != Py_None) failed = !remember(ledger, PyList_GET_ITEM(fresh.object, at), measure);
    }
    for (auto &[i, at] : places)
      if (!failed && PyList_GET_ITEM(made.object, at) != Py_None) measures[i] = Py_NewRef(PyList_GET_ITEM(made.object, at));
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "measure must return a list of as many");
  }
  Py_ssize_t found = 0;
  for (PyObject *measure : measures) found += measure != nullptr && measure != Py_None;
  PyObject *pairs = failed ? nullptr : PyTuple_New(2 * found);
  Py_ssize_t place = 0;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (pairs == nullptr || measures[i] == nullptr || measures[i] == Py_None) {
      Py_XDECREF(measures[i]);
      continue;
    }
    PyTuple_SET_ITEM(pairs, place++, PyLong_FromSsize_t(i));
    PyTuple_SET_ITEM(pairs, place++, measures[i]);
  }
  return pairs;
}

PyObject *leave_alone(PyObject *self, PyObject *tensors) {
  Owned all{PySequence_Fast(tensors, "leave_alone takes a list")};
  if (all == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.object); ++i)
    if (!remember(reinterpret_cast<Ledger *>(self), PySequence_Fast_GET_ITEM(all.object, i), Py_None)) return nullptr;
  Py_RETURN_NONE;
}

PyObject *clear_ledger(PyObject *self, PyObject *) {
  forget_all(reinterpret_cast<Ledger *>(self), false);
  Py_RETURN_NONE;
}

PyObject *new_ledger(PyTypeObject *type, PyObject *, PyObject *) {
  auto *ledger = reinterpret_cast<Ledger *>(type->tp_alloc(type, 0));
  if (ledger == nullptr) return nullptr;
  ledger->known = new std::unordered_map<PyObject *, Measured>();
  ledger->reused = 0;
  ledger->clean_at = 4096;
  return reinterpret_cast<PyObject *>(ledger);
}

void free_ledger(PyObject *self) {
  auto *ledger = reinterpret_cast<Ledger *>(self);
  forget_all(ledger, false);
  delete ledger->known;
  PyTypeObject *type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef ledger_methods[] = {
    {"look", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(look)), METH_FASTCALL, nullptr},
    {"leave_alone", leave_alone, METH_O, nullptr},
    {"clear", clear_ledger, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef ledger_members[] = {{"reused", T_PYSSIZET, offsetof(Ledger, reused), READONLY, nullptr},
                                {nullptr, 0, 0, 0, nullptr}};
PyType_Slot ledger_slots[] = {{Py_tp_new, reinterpret_cast<void *>(new_ledger)},
                              {Py_tp_dealloc, reinterpret_cast<void *>(free_ledger)},
                              {Py_tp_methods, ledger_methods},
                              {Py_tp_members, ledger_members},
                              {0, nullptr}};
PyType_Spec ledger_spec = {"op_tools_front.Ledger", sizeof(Ledger), 0, Py_TPFLAGS_DEFAULT, ledger_slots};

// -- one launch for many tensors ----------------------------------------------------------------------------

// As in statistics.cu; all of it is the kernel's one parameter.
constexpr int kMaxEntries = 32;
struct TableEntry {
  int64_t data, numel, share, first, inner, step, kind;
};
struct Table {
  int64_t count, rows;
  TableEntry entries[kMaxEntries];
};

using LaunchKernel = int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

// Fill an entry; false where the kernel cannot read the tensor as it is.
bool entered(PyObject *tensor, long long device, TableEntry &entry) {
  if (!is_plain(tensor)) return false;
  Owned dtype{got(get_dtype, tensor)}, layout{got(get_layout, tensor)}, is_cuda{got(get_is_cuda, tensor)};
  Owned negated{PyObject_CallOneArg(call_is_neg, tensor)};
  PyObject *kind = dtype == nullptr ? nullptr : PyDict_GetItemWithError(kinds_of_dtypes, dtype);
  long long index, data;
  Layout lies;
  if (kind == nullptr || layout != strided_layout || is_cuda != Py_True || negated != Py_False ||
      !asked(call_get_device, tensor, index) || index != device || !laid_out(tensor, lies) || lies.numel == 0 ||
      !asked(call_data_ptr, tensor, data)) {
    PyErr_Clear();
    return false;
  }
  entry = {data, lies.numel, 0, 0, lies.inner, lies.step, PyLong_AsLong(kind)};
  return entry.kind >= 0;
}

// (launch, function, threads, stream, device, address, free, rows, share, programs, tensors): measure the first of these
// tensors with one kernel; returns the number of elements and the first row of each that it took, in turns, and how
// many rows that makes.
PyObject *launch_statistics(PyObject *, PyObject *args) {
  unsigned long long launch, function, stream, address;
  long long device, free, rows, share, programs;
  int threads;
  PyObject *tensors;
  if (!PyArg_ParseTuple(args, "KKiKLKLLLLO!", &launch, &function, &threads, &stream, &device, &address, &free, &rows, &share,
                        &programs, &PyList_Type, &tensors))
    return nullptr;
  Table table{};
  long long blocks = 0;
  Owned found{PyList_New(0)};
  if (found == nullptr) return nullptr;
  table.rows = static_cast<int64_t>(address) + free * 48;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors) && table.count < kMaxEntries; ++i) {
    TableEntry &entry = table.entries[table.count];
    if (!entered(PyList_GET_ITEM(tensors, i), device, entry)) break;
    long long own = (entry.numel + share - 1) / share;
    if (own > programs) own = programs;
    if (free + blocks + own > rows) break;
    entry.share = (entry.numel + own - 1) / own;
    entry.share = (entry.share + 7) / 8 * 8;  // each begins where 16 bytes can be read at once, if the tensor does
    own = (entry.numel + entry.share - 1) / entry.share;
    entry.first = blocks;
    for (long long number : {static_cast<long long>(entry.numel), free + blocks}) {
      Owned one{PyLong_FromLongLong(number)};
      if (one == nullptr || PyList_Append(found, one) < 0) return nullptr;
    }
    blocks += own;
    ++table.count;
  }
  if (table.count > 0) {
    void *parameters[] = {&table};
    const int error = reinterpret_cast<LaunchKernel>(launch)(reinterpret_cast<void *>(function), blocks, 1, 1, threads, 1, 1,
                                                             0, reinterpret_cast<void *>(stream), parameters, nullptr);
    if (error != 0) {
      PyErr_Format(PyExc_RuntimeError, "cuLaunchKernel: error %d", error);
      return nullptr;
    }
  }
  Owned used{PyLong_FromLongLong(blocks)};
  if (used == nullptr || PyList_Append(found, used) < 0) return nullptr;
  return Py_NewRef(found.object);
}

// (base, dtypes, strided)
PyObject *set_up_ledger(PyObject *, PyObject *args) {
  PyObject *base;
  if (!PyArg_ParseTuple(args, "OO!O", &base, &PyDict_Type, &kinds_of_dtypes, &strided_layout)) return nullptr;
  Py_INCREF(kinds_of_dtypes);
  Py_INCREF(strided_layout);
  struct {
    PyObject *&place;
    const char *name;
  } parts[] = {{get_version, "_version"},   {get_base, "_base"},         {get_is_cuda, "is_cuda"},
               {call_numel, "numel"},       {call_is_view, "_is_view"}, {call_is_neg, "is_neg"},
               {call_get_device, "get_device"}};
  for (auto &part : parts)
    if ((part.place = PyObject_GetAttrString(base, part.name)) == nullptr) return nullptr;
  Py_RETURN_NONE;
}
