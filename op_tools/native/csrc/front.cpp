// The interceptor's steps that every call of PyTorch takes, in machine code: look the function up, tell where it was
// called, and build the key of its arguments. `op_tools/native/front.py` loads it; each step has a twin in Python, which
// runs until this is compiled, or where it cannot be. Nothing here needs PyTorch's headers: they take half a minute.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>  // PyFrame_GetBack, before Python 3.11

#include <cstdint>
#include <cstring>
#include <ctime>
#include <initializer_list>
#include <utility>
#include <vector>

#include <unistd.h>

namespace {

// A reference that is given back at the end of its scope.
struct Owned {
  PyObject *object = nullptr;
  Owned() = default;
  explicit Owned(PyObject *owned) : object(owned) {}
  Owned(const Owned &) = delete;
  Owned &operator=(const Owned &) = delete;
  ~Owned() { Py_XDECREF(object); }
  operator PyObject *() const { return object; }
};

// -- looking a function up ----------------------------------------------------------------------------------

PyObject *plans = nullptr;  // function -> plan or None; a null pointer where nothing is watched
PyObject *plan_maker = nullptr;
PyObject *watcher = nullptr;
PyObject *around = nullptr;  // what calls without Python need to know of the interceptor, see front_light.h
PyObject *name_light, *name_step, *name_append, *name_type;

void forget_all();
PyObject *watch_lightly(PyObject *light, PyObject *function, PyObject *args, PyObject *kwargs, bool &watched);

PyObject *set_plans(PyObject *, PyObject *args) {
  PyObject *new_plans, *new_maker, *new_watcher, *new_around;
  if (!PyArg_ParseTuple(args, "OOOO!", &new_plans, &new_maker, &new_watcher, &PyTuple_Type, &new_around)) return nullptr;
  Py_XINCREF(new_plans == Py_None ? nullptr : new_plans);
  for (PyObject *one : {new_maker, new_watcher, new_around}) Py_INCREF(one);
  PyObject *old[] = {plans, plan_maker, watcher, around};
  plans = new_plans == Py_None ? nullptr : new_plans;
  plan_maker = new_maker;
  watcher = new_watcher;
  around = new_around;
  for (PyObject *one : old) Py_XDECREF(one);
  forget_all();
  Py_RETURN_NONE;
}

// (function, types, args=(), kwargs=None), as PyTorch calls a mode
PyObject *torch_function(PyObject *, PyObject *const *given, Py_ssize_t count, PyObject *names) {
  PyObject *parts[4] = {nullptr, nullptr, nullptr, nullptr};
  static const char *const known[] = {"func", "types", "args", "kwargs"};
  Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (count > 4) count = 4;
  for (Py_ssize_t i = 0; i < count; ++i) parts[i] = given[i];
  for (Py_ssize_t i = 0; i < named; ++i)
    for (int k = 0; k < 4; ++k)
      if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), known[k]) == 0) parts[k] = given[count + i];
  PyObject *function = parts[0], *args = parts[2], *kwargs = parts[3];
  if (function == nullptr) {
    PyErr_SetString(PyExc_TypeError, "__torch_function__ needs a function");
    return nullptr;
  }
  PyObject *no_args = nullptr;
  if (args == nullptr || !PyTuple_Check(args)) {
    no_args = args == nullptr ? PyTuple_New(0) : PySequence_Tuple(args);
    if (no_args == nullptr) return nullptr;
    args = no_args;
  }
  if (kwargs != nullptr && (kwargs == Py_None || PyDict_GET_SIZE(kwargs) == 0)) kwargs = nullptr;
  PyObject *plan = nullptr, *result = nullptr;
  if (plans == nullptr) {
    plan = Py_None;
    Py_INCREF(plan);
  } else {
    PyObject *table = plans;  // another thread may exchange it
    Py_INCREF(table);
    plan = PyDict_GetItemWithError(table, function);
    Py_XINCREF(plan);
    Py_DECREF(table);
    if (plan == nullptr && !PyErr_Occurred()) plan = PyObject_CallOneArg(plan_maker, function);
  }
  if (plan == Py_None) {
    result = PyObject_Call(function, args, kwargs);
  } else if (plan != nullptr) {
    bool watched = false;
    if (Owned light{PyObject_GetAttr(plan, name_light)}; light == nullptr) {
      PyErr_Clear();
    } else if (PyTuple_Check(light)) {
      result = watch_lightly(light, function, args, kwargs, watched);
    }
    if (watched) {
      Py_DECREF(plan);
      Py_XDECREF(no_args);
      return result;
    }
    PyObject *names_of = kwargs == nullptr ? PyDict_New() : Py_NewRef(kwargs);
    if (names_of != nullptr) {
      PyObject *four[] = {plan, function, args, names_of};
      result = PyObject_Vectorcall(watcher, four, 4, nullptr);
      Py_DECREF(names_of);
    }
  }
  Py_XDECREF(plan);
  Py_XDECREF(no_args);
  return result;
}

PyMethodDef torch_function_method = {"__torch_function__",
                                     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(torch_function)),
                                     METH_FASTCALL | METH_KEYWORDS, nullptr};

// PyTorch insists on a method of the mode.
PyObject *bound_to(PyObject *, PyObject *mode) { return PyCFunction_NewEx(&torch_function_method, mode, nullptr); }

// -- where a call was made ----------------------------------------------------------------------------------

constexpr size_t kPlaces = 4096;
constexpr int kMaxFrames = 64;

struct Known {
  PyCodeObject *code;  // kept alive: its address is the key
  int instruction;
  PyObject *value;
};
Known owners[kPlaces], texts[kPlaces];

Known &place(Known *table, PyCodeObject *code, int instruction) {
  auto hash = (reinterpret_cast<uintptr_t>(code) >> 4) * 0x9E3779B97F4A7C15ull + unsigned(instruction) * 0xC2B2AE3Dull;
  return table[(hash >> 20) % kPlaces];
}

void keep(Known &known, PyCodeObject *code, int instruction, PyObject *value) {
  PyCodeObject *old_code = known.code;
  PyObject *old_value = known.value;
  Py_INCREF(code);
  Py_INCREF(value);
  known = {code, instruction, value};
  Py_XDECREF(old_code);
  Py_XDECREF(old_value);
}

int instruction_of(PyFrameObject *frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(frame);
#else
  return PyFrame_GetLineNumber(frame);
#endif
}

PyObject *is_user_code = nullptr;  // a function of a code object: True, False, or None for code of op_tools
PyObject *text_of = nullptr;       // a function of a code object and a line

// The text of a frame; a null pointer after an error.
PyObject *text_of_frame(PyFrameObject *frame) {
  PyCodeObject *code = PyFrame_GetCode(frame);
  int instruction = instruction_of(frame);
  Known &seen = place(texts, code, instruction);
  PyObject *text = nullptr;
  if (seen.code == code && seen.instruction == instruction) {
    text = Py_NewRef(seen.value);
  } else if (PyObject *line = PyLong_FromLong(PyFrame_GetLineNumber(frame))) {
    text = PyObject_CallFunctionObjArgs(text_of, code, line, nullptr);
    Py_DECREF(line);
    if (text != nullptr) keep(place(texts, code, instruction), code, instruction, text);
  }
  Py_DECREF(code);
  return text;
}

// Whose code a frame runs: True, False or None, borrowed; a null pointer after an error.
PyObject *owner_of(PyFrameObject *frame) {
  PyCodeObject *code = PyFrame_GetCode(frame);
  Known &known = place(owners, code, 0);
  PyObject *owner = known.value;
  if (known.code != code) {
    owner = PyObject_CallOneArg(is_user_code, reinterpret_cast<PyObject *>(code));
    if (owner != nullptr) {
      keep(place(owners, code, 0), code, 0, owner);
      Py_DECREF(owner);  // True, False and None stay
    }
  }
  Py_DECREF(code);
  return owner;
}

// The text of the nearest frame that is the user's, else of the nearest that is not of op_tools, else "".
PyObject *call_site(PyObject *, PyObject *) {
  PyFrameObject *frame = PyEval_GetFrame(), *nearest = nullptr, *found = nullptr;
  Py_XINCREF(frame);
  for (int i = 0; i < kMaxFrames && frame != nullptr && found == nullptr; ++i) {
    PyObject *owner = owner_of(frame);
    if (owner == nullptr) {
      Py_XDECREF(nearest);
      Py_DECREF(frame);
      return nullptr;
    }
    if (owner == Py_True) {
      found = frame;
      break;
    }
    PyFrameObject *back = PyFrame_GetBack(frame);
    if (owner == Py_False && nearest == nullptr) {
      nearest = frame;
    } else {
      Py_DECREF(frame);
    }
    frame = back;
  }
  if (found == nullptr) Py_XDECREF(frame);
  PyFrameObject *told = found != nullptr ? found : nearest;
  PyObject *text = told != nullptr ? text_of_frame(told) : PyUnicode_FromString("");
  Py_XDECREF(found);
  Py_XDECREF(nearest);
  return text;
}

// -- the key of arguments -----------------------------------------------------------------------------------

PyTypeObject *tensor_type = nullptr;
PyTypeObject *parameter_type = nullptr;
PyObject *plain_types = nullptr;  // a frozenset: what may be part of a key as it is
PyObject *name_shape, *name_stride, *name_dtype, *name_device, *name_requires_grad, *name_layout;

// PyTorch's own getters and methods of tensors, whatever has replaced them in `torch.Tensor`.
PyObject *get_shape, *get_dtype, *get_device, *get_requires_grad, *get_layout, *get_is_cpu, *get_is_meta;
PyObject *call_stride, *call_data_ptr;

bool is_plain(PyObject *tensor) { return Py_TYPE(tensor) == tensor_type || Py_TYPE(tensor) == parameter_type; }

PyObject *got(PyObject *getter, PyObject *tensor) {
  return Py_TYPE(getter)->tp_descr_get(getter, tensor, reinterpret_cast<PyObject *>(Py_TYPE(tensor)));
}

PyObject *count_function_modes, *count_dispatch_modes;

PyObject *set_up(PyObject *, PyObject *args) {
  PyObject *base, *tensor, *parameter, *plain;
  if (!PyArg_ParseTuple(args, "OOOOOOOO", &base, &tensor, &parameter, &plain, &is_user_code, &text_of,
                        &count_function_modes, &count_dispatch_modes))
    return nullptr;
  for (PyObject *one : {tensor, parameter, plain, is_user_code, text_of, count_function_modes, count_dispatch_modes})
    Py_INCREF(one);
  tensor_type = reinterpret_cast<PyTypeObject *>(tensor);
  parameter_type = reinterpret_cast<PyTypeObject *>(parameter);
  plain_types = plain;
  struct {
    PyObject *&place;
    const char *name;
    bool getter;
  } parts[] = {{get_shape, "shape", true},   {get_dtype, "dtype", true},     {get_device, "device", true},
               {get_layout, "layout", true}, {get_is_cpu, "is_cpu", true},   {get_requires_grad, "requires_grad", true},
               {call_stride, "stride", false}, {call_data_ptr, "data_ptr", false}, {get_is_meta, "is_meta", true}};
  for (auto &part : parts) {
    part.place = PyObject_GetAttrString(base, part.name);
    if (part.place == nullptr) return nullptr;
    if (part.getter && Py_TYPE(part.place)->tp_descr_get == nullptr) {
      PyErr_Format(PyExc_AttributeError, "%s of tensors is not a descriptor", part.name);
      return nullptr;
    }
  }
  name_light = PyUnicode_InternFromString("light");
  name_step = PyUnicode_InternFromString("step");
  name_append = PyUnicode_InternFromString("append");
  name_type = PyUnicode_InternFromString("type");
  name_shape = PyUnicode_InternFromString("shape");
  name_stride = PyUnicode_InternFromString("stride");
  name_dtype = PyUnicode_InternFromString("dtype");
  name_device = PyUnicode_InternFromString("device");
  name_requires_grad = PyUnicode_InternFromString("requires_grad");
  name_layout = PyUnicode_InternFromString("layout");
  Py_RETURN_NONE;
}

// A list of strong references that grows on the heap only for long argument lists.
struct Key {
  PyObject *few[64];
  PyObject **items = few;
  Py_ssize_t size = 0, room = 64;
  ~Key() {
    for (Py_ssize_t i = 0; i < size; ++i) Py_DECREF(items[i]);
    if (items != few) PyMem_Free(items);
  }
  bool add(PyObject *owned) {  // takes the reference
    if (owned == nullptr) return false;
    if (size == room) {
      auto **more = static_cast<PyObject **>(PyMem_Malloc(2 * room * sizeof(PyObject *)));
      if (more == nullptr) {
        Py_DECREF(owned);
        PyErr_NoMemory();
        return false;
      }
      std::memcpy(more, items, size * sizeof(PyObject *));
      if (items != few) PyMem_Free(items);
      items = more;
      room *= 2;
    }
    items[size++] = owned;
    return true;
  }
  PyObject *tuple() {
    PyObject *made = PyTuple_New(size);
    if (made == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < size; ++i) PyTuple_SET_ITEM(made, i, items[i]);
    size = 0;
    return made;
  }
};

enum Outcome { kError = -1, kIrregular = 0, kRegular = 1 };

Outcome add_value(PyObject *value, Key &key, PyObject *tensors) {
  PyTypeObject *type = Py_TYPE(value);
  if (type == tensor_type || PyType_IsSubtype(type, tensor_type)) {
    if (PyList_Append(tensors, value) < 0) return kError;
    if (is_plain(value)) {
      bool done = key.add(got(get_shape, value)) && key.add(PyObject_CallOneArg(call_stride, value)) &&
                  key.add(got(get_dtype, value)) && key.add(got(get_device, value)) &&
                  key.add(got(get_requires_grad, value)) && key.add(got(get_layout, value));
      return done ? kRegular : kError;
    }
    bool done = key.add(PyObject_GetAttr(value, name_shape)) &&
                key.add(PyObject_CallMethodNoArgs(value, name_stride)) &&
                key.add(PyObject_GetAttr(value, name_dtype)) && key.add(PyObject_GetAttr(value, name_device)) &&
                key.add(PyObject_GetAttr(value, name_requires_grad)) && key.add(PyObject_GetAttr(value, name_layout));
    return done ? kRegular : kError;
  }
  auto *kind = reinterpret_cast<PyObject *>(type);
  if (type == &PyFloat_Type) {  // by its bits: -0.0 == 0.0, nan != nan
    double number = PyFloat_AS_DOUBLE(value);
    bool done = key.add(Py_NewRef(kind)) && key.add(PyBytes_FromStringAndSize(reinterpret_cast<char *>(&number), 8));
    return done ? kRegular : kError;
  }
  if (type == &PyTuple_Type || type == &PyList_Type) {
    Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
    if (!key.add(Py_NewRef(kind)) || !key.add(PyLong_FromSsize_t(count))) return kError;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      PyObject *member = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
      Outcome outcome = add_value(member, key, tensors);
      Py_DECREF(member);
      if (outcome != kRegular) return outcome;
    }
    return kRegular;
  }
  if (type == &PySlice_Type) {
    auto *slice = reinterpret_cast<PySliceObject *>(value);
    if (!key.add(Py_NewRef(kind))) return kError;
    for (PyObject *end : {slice->start, slice->stop, slice->step}) {
      if (end != Py_None && !PyLong_CheckExact(end)) return kIrregular;
      if (!key.add(Py_NewRef(end))) return kError;
    }
    return kRegular;
  }
  int plain = PySet_Contains(plain_types, kind);
  if (plain <= 0) return plain < 0 ? kError : kIrregular;
  return key.add(Py_NewRef(kind)) && key.add(Py_NewRef(value)) ? kRegular : kError;  // the kind as well: 1 == True
}

Outcome add_arguments(PyObject *args, PyObject *kwargs, Key &key, PyObject *tensors) {
  Outcome outcome = kRegular;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args) && outcome == kRegular; ++i)
    outcome = add_value(PyTuple_GET_ITEM(args, i), key, tensors);
  PyObject *name, *value;
  Py_ssize_t position = 0;
  while (kwargs != nullptr && outcome == kRegular && PyDict_Next(kwargs, &position, &name, &value)) {
    if (!key.add(Py_NewRef(name))) return kError;
    outcome = add_value(value, key, tensors);
  }
  return outcome;
}

// (args, kwargs, tensors): a tuple that is equal for arguments that look alike; None where there is no such key.
// Tensors among the arguments are appended to the list.
PyObject *key_of(PyObject *, PyObject *const *given, Py_ssize_t count) {
  if (count != 3 || !PyTuple_Check(given[0]) || !PyDict_Check(given[1]) || !PyList_Check(given[2])) {
    PyErr_SetString(PyExc_TypeError, "key_of takes a tuple, a dict and a list");
    return nullptr;
  }
  Key key;
  Outcome outcome = add_arguments(given[0], given[1], key, given[2]);
  if (outcome == kError) return nullptr;
  if (outcome == kIrregular) Py_RETURN_NONE;
  return key.tuple();
}

#include "front_words.h"

#include "front_light.h"

PyMethodDef methods[] = {
    {"set_plans", set_plans, METH_VARARGS, "What to do with which function; None where nothing is watched."},
    {"bound_to", bound_to, METH_O, "What PyTorch calls instead of a function while this mode is on."},
    {"call_site", call_site, METH_NOARGS, "The text of the nearest frame that is the user's."},
    {"set_up", set_up, METH_VARARGS, "The class of tensors, what may be part of a key, and what tells code apart."},
    {"key_of", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(key_of)), METH_FASTCALL,
     "A tuple that is equal for arguments that look alike."},
    {"recall", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(recall)), METH_FASTCALL,
     "What is remembered of arguments like these."},
    {"retain", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(retain)), METH_FASTCALL,
     "Remember what arguments like these look like."},
    {"set_reader", set_reader, METH_VARARGS, "What reads a tensor, the class of tensors in C++, classes of constants, and that of devices."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "op_tools_front", nullptr, -1, methods,
                          nullptr,               nullptr,          nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject *PyInit_op_tools_front() {
  return PyModule_Create(&definition);
}
