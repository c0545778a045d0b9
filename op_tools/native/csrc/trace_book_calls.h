// Calls that are recorded without any Python code: where in the model one is made, and what its backward sends.
// Only calls that write to none of their arguments come here; `watch/backward.py` does the same for all others.
// Included by trace_book.cpp.

// What all calls share; filled by `Book.set_up`.
struct Shared {
  PyObject *module_call, *kind_of_code, *module_of, *texts, *text_of, *arguments, *argument_texts, *find_region;
  std::unordered_map<PyObject *, int> kinds;                           // of code objects, which are kept alive
  std::unordered_map<PyObject *, std::pair<PyObject *, int>> modules;  // parts of models: a weak reference, a number
  std::unordered_map<int64_t, int> regions;
  c10::DeviceType device = c10::DeviceType::CPU;
};
Shared shared;

enum CodeKind { kPlainCode, kModuleCode, kOptimizerCode };

int number_from(PyObject *made) {  // takes the reference
  Owned number{checked(made)};
  const long found = PyLong_AsLong(number);
  if (found == -1 && PyErr_Occurred()) throw PythonError{};
  return int(found);
}

int kind_of(PyObject *code) {
  auto found = shared.kinds.find(code);
  if (found != shared.kinds.end()) return found->second;
  const int kind = number_from(PyObject_CallOneArg(shared.kind_of_code, code));
  shared.kinds.emplace(Py_NewRef(code), kind);
  return kind;
}

PyObject *self_of(PyFrameObject *frame) {
#if PY_VERSION_HEX >= 0x030C0000
  static PyObject *name = PyUnicode_InternFromString("self");
  PyObject *found = PyFrame_GetVar(frame, name);
  if (found == nullptr) PyErr_Clear();
  return found;
#else
  Owned locals{PyFrame_GetLocals(frame)};
  PyObject *found = locals == nullptr ? nullptr : PyMapping_GetItemString(locals, "self");
  if (found == nullptr) PyErr_Clear();
  return found;
#endif
}

bool is_alive(PyObject *reference, PyObject *object) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject *found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) PyErr_Clear();
  const bool same = found == object;
  Py_XDECREF(found);
  return same;
#else
  return PyWeakref_GetObject(reference) == object;
#endif
}

struct PlaceOfCall {
  int module = -1;
  bool optimizer = false;
};

// As `place_of_call` and `module_of` of the recorder.
PlaceOfCall place_of_call() {
  PlaceOfCall place;
  PyFrameObject *frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  Owned innermost{nullptr}, outermost{nullptr};
  for (int i = 0; i < 256 && frame != nullptr; ++i) {
    auto *code = reinterpret_cast<PyObject *>(PyFrame_GetCode(frame));
    int kind = kPlainCode;
    try {
      kind = kind_of(code);
    } catch (const PythonError &) {
      Py_DECREF(code);
      Py_DECREF(frame);
      throw;
    }
    Py_DECREF(code);
    if (kind == kModuleCode) {
      PyObject *self = self_of(frame);
      if (self != nullptr) {
        if (innermost == nullptr) {
          innermost.object = Py_NewRef(self);
          auto known = shared.modules.find(self);
          if (known != shared.modules.end() && is_alive(known->second.first, self)) {
            place.module = known->second.second;
            Py_DECREF(self);
            Py_DECREF(frame);
            return place;
          }
        }
        Py_XDECREF(outermost.object);
        outermost.object = self;
      }
    } else if (kind == kOptimizerCode) {
      place.optimizer = true;
    }
    PyFrameObject *back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  if (innermost != nullptr) {  // (number, whether it is a part of a model)
    Owned found{checked(PyObject_CallFunctionObjArgs(shared.module_of, innermost.object, outermost.object, nullptr))};
    int part = 0;
    if (!PyArg_ParseTuple(found, "ip", &place.module, &part)) throw PythonError{};
    if (part) {
      PyObject *reference = checked(PyWeakref_NewRef(innermost, nullptr));
      auto &entry = shared.modules[innermost];
      Py_XDECREF(entry.first);
      entry = {reference, place.module};
    }
  }
  return place;
}

int region_now() {
  int64_t key = int64_t(at::GradMode::is_enabled()) | int64_t(c10::InferenceMode::is_enabled()) << 1;
  int shift = 2;
  for (const auto type : {shared.device, c10::DeviceType::CPU}) {
    const bool on = at::autocast::is_autocast_enabled(type);
    key |= (on ? int64_t(at::autocast::get_autocast_dtype(type)) + 1 : 0) << shift;
    shift += 10;
  }
  auto found = shared.regions.find(key);
  if (found != shared.regions.end()) return found->second;
  return shared.regions[key] = number_from(PyObject_CallNoArgs(shared.find_region));
}

int64_t stream_now() {
  if (shared.device == c10::DeviceType::CPU || !c10::impl::hasDeviceGuardImpl(shared.device)) return 0;
  const c10::impl::VirtualGuardImpl guard(shared.device);
  return int64_t(guard.getStream(guard.getDevice()).id());
}

int text_number(PyObject *text) {
  PyObject *known = PyDict_GetItemWithError(shared.texts, text);
  if (known != nullptr) return int(PyLong_AsLong(known));
  if (PyErr_Occurred()) throw PythonError{};
  return number_from(PyObject_CallOneArg(shared.text_of, text));
}

// -- the backward of a call ---------------------------------------------------------------------------------

struct HeldBook {  // a book that hooks keep
  PyObject *object;
  Book *book;
};

struct CallState : public AwaitedCall {
  HeldBook held;
  int name, location, step, module;
  int64_t forward;
  ~CallState() override {
    if (!Py_IsInitialized()) return;
    const auto gil = PyGILState_Ensure();
    Py_DECREF(held.object);
    PyGILState_Release(gil);
  }

  void failed(PyObject *error) override { held.book->tell(name, error); }

  void told(SomeTensors outputs, SomeTensors inputs, c10::ArrayRef<Wider> becomes) override {
    Book &book = *held.book;
    if (book.closed) return;
    book.last_module = module;
    const int64_t op = book.add_operator(step, kBackward, name, module, location, 0, 0, region_now(), stream_now(), 0, forward);
    for (size_t i = 0; i < outputs.size(); ++i)
      if (outputs[i].defined())
        book.edge(op, kInput, int64_t(i), book.number(outputs[i], outputs[i], nullptr, -1, -1, 0, -1, false, true));
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].defined()) continue;
      book.allocated(op, module, inputs[i], kGradient);
      if (becomes[i].dtype != at::ScalarType::Undefined) {
        book.edge(op, kOutput, int64_t(i), book.converted(inputs[i], becomes[i].dtype, op, int64_t(i), module));
        if (becomes[i].leaf == nullptr) continue;
        auto entry = book.sent_to.emplace(becomes[i].leaf, op);
        if (!entry.second) entry.first->second = -2;
        continue;
      }
      const int64_t made = book.number(inputs[i], inputs[i], nullptr, -1, op, int64_t(i), module, false, true);
      book.edge(op, kOutput, int64_t(i), made);
      book.sent[book.memory_of(inputs[i])] = op;
    }
    book.print_fresh();
    book.flush_when_due();
  }
};

