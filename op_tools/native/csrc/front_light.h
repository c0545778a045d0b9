// Watching a call without any Python code of the tools: for one tool that only notes what was called, or how long it took,
// and only where a call looks like an earlier one. Everything else goes to `Interceptor.watch`, which does the same.
// Included by front.cpp.

// What `light` of a plan holds; the second half only where a trace is recorded, calls are logged with the numbers of their
// tensors, or times are measured.
enum Light { kOp, kCalls, kRows, kFlush, kSites, kFindSite, kFailed, kRun, kSizeOfNote,
             kBegin = kSizeOfNote, kEnd, kName, kSizeOfTrace,
             kIsView = kName, kNoting, kSizeOfLog,
             kMark = kSizeOfNote, kRelease, kSequence, kRan, kListening, kDeviceType, kRunsKernel, kSizeOfTime };
// What `around` holds: all calls share it.
enum Around { kInterceptor, kKnown, kDescribe, kIds, kStarts, kCapturing, kSizeOfAround };

constexpr unsigned kAskEvery = 64;  // rows: as `record` of the tools

bool is_none_active(PyObject *count_modes) {
  Owned count{PyObject_CallNoArgs(count_modes)};
  return count != nullptr && PyLong_AsLong(count) == 0;
}

// Whether all tensors are of PyTorch's own classes, and the first one that is not on the CPU; a borrowed reference.
bool all_plain(PyObject *tensors, PyObject *&on_device) {
  on_device = nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject *tensor = PyList_GET_ITEM(tensors, i);
    if (!is_plain(tensor)) return false;
    if (on_device != nullptr) continue;
    Owned is_cpu{got(get_is_cpu, tensor)};
    if (is_cpu == nullptr) return false;
    if (is_cpu == Py_False) on_device = tensor;
  }
  return true;
}

// The description of arguments like these if there is one, borrowed; no error is set.
PyObject *description_of(PyObject *args, PyObject *kwargs, PyObject *tensors, PyObject *known) {
  Key key;
  PyObject *found = nullptr;
  if (add_arguments(args, kwargs, key, tensors) == kRegular) {
    Owned whole{key.tuple()};
    if (whole != nullptr) found = PyDict_GetItemWithError(known, whole);
  }
  PyErr_Clear();
  return found;
}

void add_addresses(std::vector<uint64_t> &addresses, const Words &like) {
  for (int32_t i = 0; i < like.tensors; ++i) addresses.push_back(like.read[i].address);
}

void add_addresses(std::vector<uint64_t> &addresses, PyObject *tensors) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    Owned number{PyObject_CallOneArg(call_data_ptr, PyList_GET_ITEM(tensors, i))};
    addresses.push_back(number == nullptr ? 0 : PyLong_AsUnsignedLongLong(number));
    if (PyErr_Occurred()) {  // some tensors have no address
      PyErr_Clear();
      addresses.back() = 0;
    }
  }
}

// A function of the backward clock, in C++.
template <typename Function>
Function of_clock(PyObject *light, Light which) {
  return reinterpret_cast<Function>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(light, which)));
}
using Mark = void *(*)();  // a device event that is recorded now; a null pointer where that fails
using Release = void (*)(void *, void *);
using Sequence = uint64_t (*)();
using Ran = int64_t (*)(void *, void *, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

int64_t now() {  // as time.perf_counter_ns
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000ll + time.tv_nsec;
}

struct Watched {
  PyObject *light, *id, *location, *inputs;  // borrowed
  Owned tensors, begun;
  std::vector<uint64_t> addresses;  // of tensors among the arguments, then of results
  void *events[2] = {nullptr, nullptr};  // before and after
  Release release = nullptr;
  int64_t sequence = 0, began = 0;
  ~Watched() {  // of a call that failed, or could not be noted
    if (events[0] != nullptr) release(events[0], events[1]);
  }
};

// One row in the order of the tool's table.
PyObject *row_of(Watched &call, PyObject *site, PyObject *step) {
  const auto *bytes = reinterpret_cast<const char *>(call.addresses.data());
  Owned addresses{PyBytes_FromStringAndSize(bytes, Py_ssize_t(8 * call.addresses.size()))};
  if (addresses == nullptr) return nullptr;
  return PyTuple_Pack(5, PyTuple_GET_ITEM(call.light, kRun), call.id, site, step, addresses.object);
}

bool count_call(PyObject *light) {
  PyObject *calls = PyTuple_GET_ITEM(light, kCalls), *op = PyTuple_GET_ITEM(light, kOp);
  PyObject *before = PyDict_GetItemWithError(calls, op);
  if (before == nullptr && PyErr_Occurred()) return false;
  Owned count{PyLong_FromLongLong(1 + (before == nullptr ? 0 : PyLong_AsLongLong(before)))};
  return count != nullptr && PyDict_SetItem(calls, op, count) == 0;
}

// The tensors of a result in order; false where it is of another kind than most.
bool collected(PyObject *result, PyObject *results) {
  if (is_plain(result)) return PyList_Append(results, result) == 0;
  if (result == Py_None) return true;
  if (!PyTuple_Check(result) && !PyList_CheckExact(result)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(result); ++i)
    if (!collected(PySequence_Fast_GET_ITEM(result, i), results)) return false;
  return true;
}

// The tensors of a result, whatever it is.
bool list_results(PyObject *shared, PyObject *result, PyObject *results) {
  if (collected(result, results)) return true;
  PyErr_Clear();
  if (PyList_SetSlice(results, 0, PyList_GET_SIZE(results), nullptr) < 0) return false;
  Owned described{PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(shared, kDescribe), result, results, nullptr)};
  return described != nullptr;
}

// A call of a run that is traced.
bool trace(Watched &call, PyObject *shared, PyObject *result) {
  Owned results{PyList_New(0)};
  if (results == nullptr || !list_results(shared, result, results)) return false;
  Owned step{PyObject_GetAttr(PyTuple_GET_ITEM(shared, kInterceptor), name_step)};
  if (step == nullptr || !count_call(call.light)) return false;
  PyObject *given[] = {call.begun, call.tensors, PyTuple_GET_ITEM(call.light, kName), call.location,
                       call.inputs, results,      step,                                PyTuple_GET_ITEM(call.light, kOp)};
  Owned done{PyObject_Vectorcall(PyTuple_GET_ITEM(call.light, kEnd), given, 8, nullptr)};
  return done != nullptr;
}

// What a call returned, owned: as remembered, else by its tuple; a null pointer after an error. Addresses are noted.
PyObject *described_result(Watched &call, PyObject *shared, PyObject *result) {
  const Scratch room;
  Words &like = *room;
  const bool is_read = read_tensor != nullptr && like.add(result);
  const uint64_t hash = is_read ? like.hash() : 0;
  PyObject *found = is_read ? Py_XNewRef(remembered(like, hash)) : nullptr;
  if (is_read) add_addresses(call.addresses, like);
  if (found != nullptr) return found;
  Owned results{PyList_New(0)}, only{PyTuple_Pack(1, result)};
  if (results == nullptr || only == nullptr) return nullptr;
  PyObject *on_device;
  found = Py_XNewRef(description_of(only, nullptr, results, PyTuple_GET_ITEM(shared, kKnown)));
  if (found != nullptr && all_plain(results, on_device)) {
    if (is_read) remember(like, hash, found);
  } else {
    PyErr_Clear();
    Py_XDECREF(found);
    found = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(shared, kDescribe), result, results.object, nullptr);
  }
  if (!is_read && found != nullptr) add_addresses(call.addresses, results);
  return found;
}

// The number of the site of a call, owned; a null pointer after an error.
PyObject *numbered_site(Watched &call, PyObject *outputs) {
  PyObject *light = call.light, *op = PyTuple_GET_ITEM(light, kOp);
  PyObject *parts[] = {op, call.location, call.inputs, outputs};
  Site &known = site_of(parts);
  if (known.number != nullptr && std::memcmp(known.parts, parts, sizeof(parts)) == 0) return Py_NewRef(known.number);
  Owned place{PyTuple_Pack(4, op, call.location, PyTuple_GET_ITEM(call.inputs, 3), PyTuple_GET_ITEM(outputs, 3))};
  if (place == nullptr) return nullptr;
  Owned number{Py_XNewRef(PyDict_GetItemWithError(PyTuple_GET_ITEM(light, kSites), place))};
  if (number == nullptr)
    return PyErr_Occurred() ? nullptr
                            : PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(light, kFindSite), op, call.location,
                                                           call.inputs, outputs, nullptr);
  Site &room = site_of(parts);
  Site old = room;
  for (int i = 0; i < 4; ++i) room.parts[i] = Py_NewRef(parts[i]);
  room.number = Py_NewRef(number.object);
  for (PyObject *one : {old.parts[0], old.parts[1], old.parts[2], old.parts[3], old.number}) Py_XDECREF(one);
  return Py_NewRef(number.object);
}

// A call of a run whose calls are logged with the numbers of their tensors.
bool log_call(Watched &call, PyObject *shared, PyObject *result) {
  Owned results{PyList_New(0)};
  if (results == nullptr || !list_results(shared, result, results)) return false;
  Owned outputs{described_result(call, shared, result)};
  Owned site{outputs == nullptr ? nullptr : numbered_site(call, outputs)};
  Owned step{site == nullptr ? nullptr : PyObject_GetAttr(PyTuple_GET_ITEM(shared, kInterceptor), name_step)};
  if (step == nullptr || !count_call(call.light)) return false;
  PyObject *places = PyTuple_GET_ITEM(call.light, kNoting);  // a list of who wants to know where calls are made
  if (PyList_GET_SIZE(places) > 0) {
    Owned place{Py_NewRef(PyList_GET_ITEM(places, 0))};
    Owned noted{PyObject_CallFunctionObjArgs(place, call.id, site.object, step.object, nullptr)};
    if (noted == nullptr) return false;
  }
  PyObject *given[] = {call.begun, call.tensors, results, step, call.id, site, PyTuple_GET_ITEM(call.light, kIsView)};
  Owned done{PyObject_Vectorcall(PyTuple_GET_ITEM(call.light, kEnd), given, 7, nullptr)};
  return done != nullptr;
}

bool asked_to_flush(PyObject *light) {
  Owned flushed{PyObject_CallOneArg(PyTuple_GET_ITEM(light, kFlush), PyTuple_GET_ITEM(light, kRows))};
  return flushed != nullptr;
}

bool note(Watched &call, PyObject *shared, PyObject *result) {
  PyObject *light = call.light;
  Owned outputs{described_result(call, shared, result)};
  Owned site{outputs == nullptr ? nullptr : numbered_site(call, outputs)};
  Owned step{site == nullptr ? nullptr : PyObject_GetAttr(PyTuple_GET_ITEM(shared, kInterceptor), name_step)};
  if (step == nullptr || !count_call(light)) return false;
  if (PyTuple_GET_SIZE(light) == kSizeOfTime) {  // the clock keeps it until the device has passed its events
    const int64_t id = PyLong_AsLongLong(call.id), where = PyLong_AsLongLong(site), when = PyLong_AsLongLong(step);
    const int64_t which = PyLong_AsLongLong(PyTuple_GET_ITEM(light, kListening));
    if (PyErr_Occurred()) return false;
    of_clock<Ran>(light, kRan)(call.events[0], call.events[1], id, where, when, call.began, call.sequence, which);
    call.events[0] = call.events[1] = nullptr;
    static unsigned count = 0;  // under the GIL
    return ++count % kAskEvery != 0 || asked_to_flush(light);
  }
  Owned row{row_of(call, site, step)};
  PyObject *rows = PyTuple_GET_ITEM(light, kRows);
  Owned done{row == nullptr ? nullptr : PyObject_CallMethodOneArg(rows, name_append, row)};
  const Py_ssize_t size = done == nullptr ? -1 : PyObject_Size(rows);
  return size >= 0 && (size % kAskEvery != 0 || asked_to_flush(light));
}

// Whether nothing stands in the way of a short cut: no other mode, no compiled code, no graph that is being captured.
bool may_watch(PyObject *shared) {
  if (PyList_GET_SIZE(PyTuple_GET_ITEM(shared, kStarts)) > 0) return false;
  if (!is_none_active(count_function_modes) || !is_none_active(count_dispatch_modes)) return false;
  PyObject *capturing = PyTuple_GET_ITEM(shared, kCapturing);
  if (capturing == Py_None) return true;
  Owned answer{PyObject_CallNoArgs(capturing)};
  return answer == Py_False;
}

// Whether arguments by name say that a call writes to one.
bool names_written(PyObject *kwargs) {
  if (kwargs == nullptr) return false;
  static PyObject *const names[] = {PyUnicode_InternFromString("out"), PyUnicode_InternFromString("inplace")};
  for (PyObject *name : names) {
    PyObject *value = PyDict_GetItemWithError(kwargs, name);
    if (value != nullptr && value != Py_None && value != Py_False) return true;
  }
  return false;
}

bool is_on(PyObject *tensor, PyObject *device_type) {
  Owned is_meta{got(get_is_meta, tensor)};
  if (is_meta != Py_False) return false;
  if (device_type == nullptr) return true;
  Owned device{got(get_device, tensor)}, type{device == nullptr ? nullptr : PyObject_GetAttr(device, name_type)};
  return type != nullptr && PyUnicode_Compare(type, device_type) == 0;
}

// Whether arguments by name say that a call without tensors makes one on the device whose times are measured, or on any.
bool names_device(PyObject *kwargs, PyObject *device_type) {
  static PyObject *const name = PyUnicode_InternFromString("device");
  PyObject *device = kwargs == nullptr ? nullptr : PyDict_GetItemWithError(kwargs, name);  // borrowed
  if (device == nullptr || Py_TYPE(device) != device_class) return false;
  Owned type{PyObject_GetAttr(device, name_type)};
  if (type == nullptr || !PyUnicode_Check(type)) return false;
  if (device_type != nullptr) return PyUnicode_Compare(type, device_type) == 0;
  return PyUnicode_CompareWithASCIIString(type, "cpu") != 0 && PyUnicode_CompareWithASCIIString(type, "meta") != 0;
}

// Whether the first tensor that is not on the CPU is on the device whose times are measured, or on any.
bool is_on_device(const Words &like, PyObject *device_type) {
  static PyObject *known_type = nullptr;  // the last that was compared, by name
  static int32_t known_number = 0;
  for (int32_t i = 0; i < like.tensors; ++i) {
    const Read &one = like.read[i];
    if (one.device_type == 0) continue;
    if (one.device_type < 0) return false;
    if (device_type == nullptr || (known_type == device_type && known_number == one.device_type)) return true;
    if (!is_on(one.tensor, device_type)) return false;
    Py_INCREF(device_type);
    Py_XSETREF(known_type, device_type);
    known_number = one.device_type;
    return true;
  }
  return false;
}

bool list_tensors(Watched &call, const Words &like) {
  call.tensors.object = PyList_New(like.tensors);
  if (call.tensors == nullptr) return false;
  for (int32_t i = 0; i < like.tensors; ++i) PyList_SET_ITEM(call.tensors.object, i, Py_NewRef(like.read[i].tensor));
  return true;
}

// What the arguments of a call look like, owned, if that is known and the call is one to watch; no error is set.
PyObject *described_arguments(Watched &call, PyObject *shared, PyObject *args, PyObject *kwargs, bool timed, bool recorded) {
  PyObject *device_type = timed ? PyTuple_GET_ITEM(call.light, kDeviceType) : nullptr;
  const Scratch room;
  Words &like = *room;
  const bool is_read = read_tensor != nullptr && like.add_all(args, kwargs);
  if (is_read && !(like.tensors == 0 ? names_device(kwargs, device_type) : is_on_device(like, device_type))) {
    PyErr_Clear();
    return nullptr;
  }
  const uint64_t hash = is_read ? like.hash() : 0;
  Owned found{is_read ? Py_XNewRef(remembered(like, hash)) : nullptr};
  if (found == nullptr) {
    call.tensors.object = PyList_New(0);
    if (call.tensors != nullptr)
      found.object = Py_XNewRef(description_of(args, kwargs, call.tensors, PyTuple_GET_ITEM(shared, kKnown)));
    PyObject *on_device = nullptr;
    const bool makes = is_read && like.tensors == 0;  // and names its device, as was seen above
    if (found == nullptr || !(makes || (all_plain(call.tensors, on_device) && on_device != nullptr && is_on(on_device, device_type)))) {
      PyErr_Clear();
      return nullptr;
    }
    if (is_read) remember(like, hash, found);
  } else if (recorded && !list_tensors(call, like)) {
    PyErr_Clear();
    return nullptr;
  }
  if (!timed && !recorded) {  // where tensors were before the call
    if (is_read) {
      add_addresses(call.addresses, like);
    } else {
      add_addresses(call.addresses, call.tensors);
    }
  }
  return Py_NewRef(found.object);
}

// Call a function and note it; `watched` stays false where `Interceptor.watch` must do that, and nothing has happened then.
PyObject *watch_lightly(PyObject *light, PyObject *function, PyObject *args, PyObject *kwargs, bool &watched) {
  Owned shared{Py_XNewRef(around)};
  const Py_ssize_t size = PyTuple_GET_SIZE(light);
  const bool timed = size == kSizeOfTime, recorded = size == kSizeOfTrace || size == kSizeOfLog;
  if (recorded && names_written(kwargs)) return nullptr;
  if (shared == nullptr || PyTuple_GET_SIZE(shared.object) != kSizeOfAround || !may_watch(shared)) {
    PyErr_Clear();
    return nullptr;
  }
  Watched call{};
  call.light = light;
  Owned inputs{described_arguments(call, shared, args, kwargs, timed, recorded)};
  if (inputs == nullptr) return nullptr;
  Owned location{call_site(nullptr, nullptr)}, id{location == nullptr ? nullptr : PyIter_Next(PyTuple_GET_ITEM(shared.object, kIds))};
  const bool marks = timed && PyTuple_GET_ITEM(light, kRunsKernel) == Py_True;
  if (id != nullptr && timed) {
    call.sequence = int64_t(of_clock<Sequence>(light, kSequence)());
    call.began = now();
    call.release = of_clock<Release>(light, kRelease);
    if (marks) call.events[0] = of_clock<Mark>(light, kMark)();
  }
  if (id != nullptr && recorded) call.begun.object = PyObject_CallOneArg(PyTuple_GET_ITEM(light, kBegin), call.tensors);
  if (id == nullptr || (marks && call.events[0] == nullptr) || (recorded && (call.begun == nullptr || call.begun == Py_None))) {
    PyErr_Clear();
    return nullptr;
  }
  watched = true;
  call.id = id;
  call.location = location;
  call.inputs = inputs;
  Owned result{PyObject_Call(function, args, kwargs)};
  if (result == nullptr) return nullptr;
  if (marks && (call.events[1] = of_clock<Mark>(light, kMark)()) == nullptr) PyErr_SetString(PyExc_RuntimeError, "no event could be recorded");
  const auto tell = size == kSizeOfTrace ? trace : size == kSizeOfLog ? log_call : note;
  if (PyErr_Occurred() || !tell(call, shared, result)) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;  // Ctrl-C
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    Owned told{PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(light, kFailed), function, id.object, location.object, error, nullptr)};
    for (PyObject *one : {type, error, trace}) Py_XDECREF(one);
    if (told == nullptr) PyErr_Clear();  // the training goes on
  }
  return Py_NewRef(result.object);
}
