// The methods of a book. Included by trace_book.cpp.

Book &book_of(PyObject *self) { return *book_in(self); }

// (tensor, held, look, producer, output, module, wrote, print)
PyObject *book_number(PyObject *self, PyObject *args) {
  PyObject *tensor, *held;
  int look, module, wrote, print;
  long long producer, output;
  if (!PyArg_ParseTuple(args, "OOiLLipp", &tensor, &held, &look, &producer, &output, &module, &wrote, &print)) return nullptr;
  return safely([&] {
    const at::Tensor one = unwrapped(tensor);
    const at::Tensor other = held == tensor ? one : unwrapped(held);
    return PyLong_FromLongLong(book_of(self).number(one, other, tensor, look, producer, output, module, wrote, print));
  });
}

PyObject *book_knows(PyObject *self, PyObject *tensor) {
  return safely([&] {
    const at::Tensor one = unwrapped(tensor);
    Book &book = book_of(self);
    return PyBool_FromLong(book.knows(one));
  });
}

// (step, phase, name, module, location, stack, arguments, region, stream, group, forward)
PyObject *book_operator(PyObject *self, PyObject *args) {
  int step, phase, name, module, location, stack, arguments, region, group;
  long long stream, forward;
  if (!PyArg_ParseTuple(args, "iiiiiiiiLiL", &step, &phase, &name, &module, &location, &stack, &arguments, &region, &stream,
                        &group, &forward))
    return nullptr;
  return safely([&] {
    Book &book = book_of(self);
    book.flush_when_due();
    return PyLong_FromLongLong(
        book.add_operator(step, phase, name, module, location, stack, arguments, region, stream, group, forward));
  });
}

// (operator, side, place, tensor)
PyObject *book_edge(PyObject *self, PyObject *args) {
  long long op, place, tensor;
  int side;
  if (!PyArg_ParseTuple(args, "LiLL", &op, &side, &place, &tensor)) return nullptr;
  book_of(self).edge(op, side, place, tensor);
  Py_RETURN_NONE;
}

// -- many at once: an optimizer has thousands ---------------------------------------------------------------

bool all_plain(PyObject *tensors) {
  if (!PyList_Check(tensors)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i)
    if (!is_plain(PyList_GET_ITEM(tensors, i))) return false;
  return true;
}

PyObject *list_of(const std::vector<int64_t> &numbers) {
  PyObject *list = checked(PyList_New(Py_ssize_t(numbers.size())));
  for (size_t i = 0; i < numbers.size(); ++i) PyList_SET_ITEM(list, Py_ssize_t(i), PyLong_FromLongLong(numbers[i]));
  return list;
}

// The numbers of a list of plain tensors; None where it has others.
PyObject *book_numbers(PyObject *self, PyObject *tensors) {
  return safely([&]() -> PyObject * {
    if (!all_plain(tensors)) Py_RETURN_NONE;
    std::vector<int64_t> found;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
      const at::Tensor tensor = unwrapped(PyList_GET_ITEM(tensors, i));
      found.push_back(book_of(self).number(tensor, tensor, PyList_GET_ITEM(tensors, i), -1, -1, 0, -1, false, true));
    }
    return list_of(found);
  });
}

PyObject *book_versions(PyObject *, PyObject *tensors) {
  return safely([&]() -> PyObject * {
    std::vector<int64_t> found;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) found.push_back(version_of(unwrapped(PyList_GET_ITEM(tensors, i))));
    return list_of(found);
  });
}

// (operator, side, numbers)
PyObject *book_edges(PyObject *self, PyObject *args) {
  long long op;
  int side;
  PyObject *numbers;
  if (!PyArg_ParseTuple(args, "LiO!", &op, &side, &PyList_Type, &numbers)) return nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(numbers); ++i) {
    const long long number = PyLong_AsLongLong(PyList_GET_ITEM(numbers, i));
    if (number >= 0) book_of(self).edge(op, side, i, number);
  }
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// (operator, module, results, written, phase): False where some are not plain, and nothing has happened then.
PyObject *book_outputs(PyObject *self, PyObject *args) {
  long long op;
  int module, phase;
  PyObject *results, *written;
  if (!PyArg_ParseTuple(args, "LiOOi", &op, &module, &results, &written, &phase)) return nullptr;
  return safely([&]() -> PyObject * {
    if (!all_plain(results) || !all_plain(written)) Py_RETURN_FALSE;
    Book &book = book_of(self);
    std::unordered_map<TensorImpl *, bool> done;
    int64_t place = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(written); ++i, ++place) {
      const at::Tensor tensor = unwrapped(PyList_GET_ITEM(written, i));
      book.writers[tensor.has_storage() ? tensor.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl() : nullptr] = op;
      done[tensor.unsafeGetTensorImpl()] = true;
      book.edge(op, kOutput, place, book.number(tensor, tensor, PyList_GET_ITEM(written, i), -1, op, place, module, true, true));
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(results); ++i) {
      const at::Tensor tensor = unwrapped(PyList_GET_ITEM(results, i));
      if (done.count(tensor.unsafeGetTensorImpl())) continue;
      book.edge(op, kOutput, place, book.number(tensor, tensor, PyList_GET_ITEM(results, i), -1, op, place, module, false, true));
      ++place;
      if (phase != kBackward) book.allocated(op, module, tensor, phase == kOptimizer ? kState : kActivation);
    }
    Py_RETURN_TRUE;
  });
}

// (tensor, operator)
PyObject *book_written(PyObject *self, PyObject *args) {
  PyObject *tensor;
  long long op;
  if (!PyArg_ParseTuple(args, "OL", &tensor, &op)) return nullptr;
  return safely([&]() -> PyObject * {
    const at::Tensor one = unwrapped(tensor);
    book_of(self).writers[one.has_storage() ? one.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl() : nullptr] = op;
    Py_RETURN_NONE;
  });
}

// A `torch.UntypedStorage` that has other memory now.
PyObject *book_resized(PyObject *self, PyObject *memory) {
  return safely([&]() -> PyObject * {
    Owned address{checked(PyObject_GetAttrString(memory, "_cdata"))};
    auto *storage = static_cast<StorageImpl *>(PyLong_AsVoidPtr(address.object));
    if (storage == nullptr) throw PythonError{};
    book_of(self).resized(storage, int64_t(storage->nbytes()));
    Py_RETURN_NONE;
  });
}

// Nobody has written yet where a tensor lies.
PyObject *book_unwritten(PyObject *self, PyObject *tensor) {
  return safely([&]() -> PyObject * {
    const at::Tensor one = unwrapped(tensor);
    if (one.has_storage()) book_of(self).takes_anew(one.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl(), version_of(one));
    Py_RETURN_NONE;
  });
}

// (operator, module, tensor, kind)
PyObject *book_allocated(PyObject *self, PyObject *args) {
  PyObject *tensor;
  long long op;
  int module, kind;
  if (!PyArg_ParseTuple(args, "LiOi", &op, &module, &tensor, &kind)) return nullptr;
  return safely([&]() -> PyObject * {
    book_of(self).allocated(op, module, unwrapped(tensor), kind);
    Py_RETURN_NONE;
  });
}

// (tensor, text, kind, module)
PyObject *book_name(PyObject *self, PyObject *args) {
  PyObject *tensor;
  int text, kind, module;
  if (!PyArg_ParseTuple(args, "Oiii", &tensor, &text, &kind, &module)) return nullptr;
  return safely([&]() -> PyObject * {
    book_of(self).name(unwrapped(tensor), text, kind, module);
    Py_RETURN_NONE;
  });
}

// (tensor, text of its gradient, module)
PyObject *book_parameter(PyObject *self, PyObject *args) {
  PyObject *tensor;
  int text, module;
  if (!PyArg_ParseTuple(args, "Oii", &tensor, &text, &module)) return nullptr;
  return safely([&]() -> PyObject * {
    book_of(self).parameters.push_back({weak(unwrapped(tensor)), text, module});
    Py_RETURN_NONE;
  });
}

PyObject *book_after_backward(PyObject *self, PyObject *function) {
  return safely([&]() -> PyObject * {
    sums.terms.clear();
    book_of(self).after_backward(PyLong_AsLongLong(function));
    Py_RETURN_NONE;
  });
}

// (tensor, operator)
PyObject *book_sent(PyObject *self, PyObject *args) {
  PyObject *tensor;
  long long op;
  if (!PyArg_ParseTuple(args, "OL", &tensor, &op)) return nullptr;
  return safely([&]() -> PyObject * {
    Book &book = book_of(self);
    book.sent[book.memory_of(unwrapped(tensor))] = op;
    Py_RETURN_NONE;
  });
}

PyObject *book_sender(PyObject *self, PyObject *tensor) {
  return safely([&] {
    Book &book = book_of(self);
    auto from = book.sent.find(book.memory_of(unwrapped(tensor)));
    return PyLong_FromLongLong(from == book.sent.end() ? -1 : from->second);
  });
}

PyObject *book_forget(PyObject *self, PyObject *) {
  Book &book = book_of(self);
  book.forgotten = book.tables[kTensors].all;
  Py_RETURN_NONE;
}

PyObject *book_take_fresh(PyObject *self, PyObject *) {
  return safely([&] {
    Book &book = book_of(self);
    book.printer.launch();
    PyObject *empty = checked(PyList_New(0));
    return std::exchange(book.fresh, empty);
  });
}

PyObject *book_write_frees(PyObject *self, PyObject *) {
  book_of(self).write_frees(true);
  Py_RETURN_NONE;
}

// The rows of a table that wait: their number and their columns.
PyObject *book_take(PyObject *self, PyObject *which) {
  static const char *const names[] = {"tensors", "operators", "edges", "memory", "levels"};
  for (int i = 0; i < kTables; ++i) {
    if (PyUnicode_CompareWithASCIIString(which, names[i]) != 0) continue;
    Table &table = book_of(self).tables[i];
    const int64_t rows = table.rows;
    const std::string all = table.take();
    return Py_BuildValue("(Ly#)", static_cast<long long>(rows), all.data(), static_cast<Py_ssize_t>(all.size()));
  }
  return Py_BuildValue("(iy#)", 0, "", static_cast<Py_ssize_t>(0));
}

PyObject *book_close(PyObject *self, PyObject *) {
  Book &book = book_of(self);
  book.closed = true;
  book.write_frees(true);
  book.last_level();
  book.known.clear();
  book.by_memory.clear();
  book.forget_calls();
  book.printer.forget();
  if (sums.object == self) forget_sums();
  Py_CLEAR(book.failed);
  Py_CLEAR(book.find_look);  // the recorder holds this book
  Py_CLEAR(book.launch);
  Py_CLEAR(book.flush);
  Py_RETURN_NONE;
}

// -- calls without Python: `front_light.h` calls these around each -------------------------------------------

// The tensors that go into a call: a capsule with what is known before it; None where Python must record it.
PyObject *book_begin(PyObject *self, PyObject *tensors) {
  return safely([&]() -> PyObject * {
    if (book_of(self).closed || shared.module_call == nullptr) Py_RETURN_NONE;
    return begin_call(tensors);
  });
}

// (begun, inputs, name, location, described, results, step, op): a call has run; `inputs` are the tensors of `begin`.
PyObject *book_end(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count != 8) {
    PyErr_SetString(PyExc_TypeError, "end takes eight arguments");
    return nullptr;
  }
  return safely([&]() -> PyObject * {
    Book &book = book_of(self);
    const Begun &begun = begun_in(given[0]);
    PyObject *tensors = given[1], *results = given[5];
    PlaceOfCall place = place_of_call();
    int phase = kForward;
    if (place.optimizer) phase = kOptimizer;  // a hook of a gradient may call one in the backward pass
    else if (torch::autograd::get_current_graph_task_id() != -1) phase = place.module >= 0 || at::GradMode::is_enabled() ? kRecomputed : kBackward;
    if (phase == kBackward) place.module = book.last_module;  // the backward of a function of the user's own
    const int name = int(PyLong_AsLong(given[2])), location = text_number(given[3]), step = int(PyLong_AsLong(given[6]));
    PyObject *text = PyDict_GetItemWithError(shared.argument_texts, PyTuple_GET_ITEM(given[4], 3));
    const int arguments = text != nullptr ? int(PyLong_AsLong(text)) : number_from(PyObject_CallOneArg(shared.arguments, given[4]));
    c10::SmallVector<int64_t, 8> numbers;
    for (size_t i = 0; i < begun.inputs.size(); ++i)
      numbers.push_back(book.number(begun.inputs[i], begun.inputs[i], PyList_GET_ITEM(tensors, Py_ssize_t(i)), -1, -1, 0, -1,
                                    false, true));
    const int64_t op = book.add_operator(step, phase, name, place.module, location, 0, arguments, region_now(), stream_now(), 0, -1);
    for (size_t i = 0; i < numbers.size(); ++i) book.edge(op, kInput, int64_t(i), numbers[i]);
    Tensors outputs;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(results); ++i) {
      PyObject *one = PyList_GET_ITEM(results, i);
      outputs.push_back(unwrapped(one));
      const at::Tensor &tensor = outputs.back();
      book.edge(op, kOutput, i, book.number(tensor, tensor, one, -1, op, i, place.module, false, true));
      if (phase != kBackward) book.allocated(op, place.module, tensor, phase == kOptimizer ? kState : kActivation);
    }
    book.print_fresh();
    book.flush_when_due();
    if (at::GradMode::is_enabled() && !outputs.empty()) {
      auto state = std::make_shared<CallState>();
      state->held = {Py_NewRef(self), &book};
      state->name = name;
      state->location = location;
      state->step = step;
      state->module = place.module;
      state->forward = op;
      attach(state, begun.inputs, outputs, begun.since);
      const uint64_t now = at::sequence_number::peek();
      if (state->nodes > 0 && now > begun.since) book.note_nodes(begun.since, now, given[7], given[3]);
    }
    Py_RETURN_NONE;
  });
}

// (thread, number of a node): the name and the line of the call that made it, or None.
PyObject *book_call_at(PyObject *self, PyObject *args) {
  unsigned long long thread, number;
  if (!PyArg_ParseTuple(args, "KK", &thread, &number)) return nullptr;
  const Made *at = call_at(book_of(self), thread, number);
  if (at == nullptr) Py_RETURN_NONE;
  return PyTuple_Pack(2, at->op, at->location);
}

// (who knows the step, counts of calls, callbacks of Python): addresses of the callbacks that record sums of gradients.
PyObject *book_hear_sums(PyObject *self, PyObject *args) {
  PyObject *watcher, *calls;
  unsigned long long before, after;
  if (!PyArg_ParseTuple(args, "OO!KK", &watcher, &PyDict_Type, &calls, &before, &after)) return nullptr;
  forget_sums();
  sums.object = Py_NewRef(self);
  sums.watcher = Py_NewRef(watcher);
  sums.calls = Py_NewRef(calls);
  sums.before = reinterpret_cast<BeforeSum>(before);
  sums.after = reinterpret_cast<AfterSum>(after);
  return Py_BuildValue("(KK)", reinterpret_cast<unsigned long long>(&before_sum), reinterpret_cast<unsigned long long>(&after_sum));
}

// Who is told of errors in backward passes.
PyObject *book_tell(PyObject *self, PyObject *failed) {
  Py_XSETREF(book_of(self).failed, Py_NewRef(failed));
  Py_RETURN_NONE;
}

// (module_call's and other functions of the recorder, see `trace/book.py`)
PyObject *book_set_up(PyObject *, PyObject *args) {
  PyObject *parts[8], *names;
  const char *device;
  if (!PyArg_ParseTuple(args, "OOOOOOOOO!s", &parts[0], &parts[1], &parts[2], &parts[3], &parts[4], &parts[5], &parts[6],
                        &parts[7], &PyTuple_Type, &names, &device))
    return nullptr;
  PyObject **places[] = {&shared.module_call, &shared.kind_of_code,   &shared.module_of,   &shared.texts,    &shared.text_of,
                         &shared.arguments,   &shared.argument_texts, &shared.find_region};
  for (int i = 0; i < 8; ++i) {
    PyObject *old = *places[i];
    *places[i] = Py_NewRef(parts[i]);
    Py_XDECREF(old);
  }
  for (auto &[key, entry] : shared.modules) Py_DECREF(entry.first);
  shared.modules.clear();
  shared.regions.clear();
  set_passing(names);
  return safely([&]() -> PyObject * {
    shared.device = c10::Device(std::string(device)).type();
    Py_RETURN_NONE;
  });
}

// (find_look, launch or None, flush, device type of the accelerator)
PyObject *new_book(PyTypeObject *type, PyObject *args, PyObject *) {
  PyObject *find_look, *launch, *flush;
  const char *device;
  if (!PyArg_ParseTuple(args, "OOOs", &find_look, &launch, &flush, &device)) return nullptr;
  PyObject *fresh = PyList_New(0);
  auto *made = fresh == nullptr ? nullptr : reinterpret_cast<BookObject *>(type->tp_alloc(type, 0));
  if (made == nullptr) {
    Py_XDECREF(fresh);
    return nullptr;
  }
  made->book = new Book(c10::Device(std::string(device)).type());
  made->book->find_look = Py_NewRef(find_look);
  made->book->launch = Py_NewRef(launch);
  made->book->flush = Py_NewRef(flush);
  made->book->prints = launch != Py_None;
  made->book->fresh = fresh;
  return reinterpret_cast<PyObject *>(made);
}

void free_book(PyObject *self) {
  Book *book = &book_of(self);
  book->forget_calls();
  book->printer.forget();
  Py_XDECREF(book->failed);
  Py_XDECREF(book->find_look);
  Py_XDECREF(book->launch);
  Py_XDECREF(book->flush);
  Py_XDECREF(book->fresh);
  delete book;
  PyTypeObject *type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject *get_operators(PyObject *self, void *) { return PyLong_FromLongLong(book_of(self).tables[kOperators].all); }
PyObject *get_tensors(PyObject *self, void *) { return PyLong_FromLongLong(book_of(self).tables[kTensors].all); }
// After how many more tensors one that has ended is forgotten.
PyObject *get_remembered(PyObject *self, void *) { return PyLong_FromLongLong(book_of(self).remembered); }
int set_remembered(PyObject *self, PyObject *count, void *) {
  book_of(self).remembered = PyLong_AsLongLong(count);
  return PyErr_Occurred() ? -1 : 0;
}
PyObject *get_last_module(PyObject *self, void *) { return PyLong_FromLong(book_of(self).last_module); }
int set_last_module(PyObject *self, PyObject *value, void *) {
  book_of(self).last_module = int(PyLong_AsLong(value));
  return PyErr_Occurred() ? -1 : 0;
}

#include "trace_book_printed.h"

#define METHOD(name, flags) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(book_##name)), flags, nullptr}
PyMethodDef book_methods[] = {METHOD(number, METH_VARARGS),   METHOD(knows, METH_O),           METHOD(operator, METH_VARARGS),
                              METHOD(edge, METH_VARARGS),     METHOD(written, METH_VARARGS),   METHOD(allocated, METH_VARARGS), METHOD(resized, METH_O), METHOD(unwritten, METH_O),
                              METHOD(name, METH_VARARGS),     METHOD(parameter, METH_VARARGS), METHOD(after_backward, METH_O),
                              METHOD(sent, METH_VARARGS),     METHOD(sender, METH_O),          METHOD(forget, METH_NOARGS),
                              METHOD(take_fresh, METH_NOARGS), METHOD(print_on, METH_VARARGS), METHOD(print, METH_VARARGS),
                              METHOD(take_printed, METH_NOARGS), METHOD(write_frees, METH_NOARGS), METHOD(take, METH_O),
                              METHOD(numbers, METH_O),        METHOD(versions, METH_O),        METHOD(edges, METH_VARARGS),
                              METHOD(outputs, METH_VARARGS),  METHOD(call_at, METH_VARARGS),  METHOD(hear_sums, METH_VARARGS), METHOD(tell, METH_O),
                              METHOD(close, METH_NOARGS),     METHOD(begin, METH_O),           METHOD(end, METH_FASTCALL),
                              {nullptr, nullptr, 0, nullptr}};
#undef METHOD
PyGetSetDef book_members[] = {{"operators", get_operators, nullptr, nullptr, nullptr},
                              {"tensors", get_tensors, nullptr, nullptr, nullptr},
                              {"last_module", get_last_module, set_last_module, nullptr, nullptr},
                              {"remembered", get_remembered, set_remembered, nullptr, nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot book_slots[] = {{Py_tp_new, reinterpret_cast<void *>(new_book)},
                            {Py_tp_dealloc, reinterpret_cast<void *>(free_book)},
                            {Py_tp_methods, book_methods},
                            {Py_tp_getset, book_members},
                            {0, nullptr}};
PyType_Spec book_spec = {"op_tools_book.Book", sizeof(BookObject), 0, Py_TPFLAGS_DEFAULT, book_slots};

PyMethodDef functions[] = {{"set_types", set_types, METH_VARARGS, nullptr},
                           {"set_up", book_set_up, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "op_tools_book", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};
