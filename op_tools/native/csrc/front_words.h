// Descriptions and sites of calls that look like an earlier one, by numbers that are read from tensors directly: no
// object of Python is made for that. `tensors.cpp` reads them; until it is compiled, keys are tuples, as for `key_of`.
// What is found here was found by its tuple before, and stays until the tools change or another takes its place.
// Included by front.cpp. All of it runs under the GIL, which is the only lock.

using ReadTensor = int32_t (*)(const void *, int64_t *, int32_t, uint64_t *, int32_t *);
ReadTensor read_tensor = nullptr;
PyObject *get_cdata = nullptr;
PyObject *constant_types = nullptr;  // a frozenset: classes of which each value is one object for ever
PyTypeObject *device_class = nullptr;

// A number for each device: objects of that class come and go.
int64_t number_of_device(PyObject *device) {
  constexpr size_t kMost = 256;
  static std::vector<PyObject *> known;
  for (size_t i = 0; i < known.size(); ++i) {
    const int same = PyObject_RichCompareBool(known[i], device, Py_EQ);
    if (same > 0) return int64_t(i);
    if (same < 0) PyErr_Clear();
  }
  if (known.size() == kMost) return -1;
  known.push_back(Py_NewRef(device));
  return int64_t(known.size()) - 1;
}

constexpr int32_t kMaxWords = 16384;  // an optimizer's call has a thousand tensors
constexpr int32_t kMaxTensors = 2048;
constexpr Py_ssize_t kMaxText = 128;
constexpr size_t kRemembered = 8192;

struct Read {  // a tensor among arguments or results, borrowed
  PyObject *tensor;
  uint64_t address;
  int32_t device_type;  // 0 is the CPU, -1 is none
};

// What a tree of arguments looks like.
class Words {
 public:
  int32_t size = 0, tensors = 0;
  int64_t words[kMaxWords];
  Read read[kMaxTensors];

  // False where there is something else than tensors of PyTorch's own classes, and plain values; no error is set.
  bool add_all(PyObject *args, PyObject *kwargs) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i)
      if (!add(PyTuple_GET_ITEM(args, i))) return false;
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (kwargs != nullptr && PyDict_Next(kwargs, &position, &name, &value))
      if (!add(name) || !add(value)) return false;
    return true;
  }

  bool add(PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    if (is_plain(value)) return add_tensor(value);
    if (!put(reinterpret_cast<int64_t>(type))) return false;
    if (value == Py_None || type == &PyEllipsis_Type) return true;
    if (type == &PyBool_Type) return put(value == Py_True);
    if (type == &PyLong_Type) {
      int overflow = 0;
      const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
      return overflow == 0 && put(number);
    }
    if (type == &PyFloat_Type) {  // by its bits: -0.0 == 0.0, nan != nan
      int64_t bits;
      const double number = PyFloat_AS_DOUBLE(value);
      std::memcpy(&bits, &number, 8);
      return put(bits);
    }
    if (type == &PyUnicode_Type) return add_text(value);
    const bool is_size = PyTuple_Check(value) && PySet_Contains(plain_types, reinterpret_cast<PyObject *>(type)) == 1;
    if (type == &PyTuple_Type || type == &PyList_Type || is_size) {
      if (!put(PySequence_Fast_GET_SIZE(value))) return false;
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i)
        if (!add(PySequence_Fast_GET_ITEM(value, i))) return false;
      return true;
    }
    if (type == &PySlice_Type) {
      auto *slice = reinterpret_cast<PySliceObject *>(value);
      for (PyObject *end : {slice->start, slice->stop, slice->step})
        if ((end != Py_None && !PyLong_CheckExact(end)) || !add(end)) return false;
      return true;
    }
    if (type == device_class) {
      const int64_t number = number_of_device(value);
      return number >= 0 && put(number);
    }
    return PySet_Contains(constant_types, reinterpret_cast<PyObject *>(type)) == 1 && put(reinterpret_cast<int64_t>(value));
  }

  uint64_t hash() const {
    uint64_t found = 0x9E3779B97F4A7C15ull + uint64_t(size);
    for (int32_t i = 0; i < size; ++i) {
      found = (found ^ uint64_t(words[i])) * 0xff51afd7ed558ccdull;
      found ^= found >> 32;
    }
    return found;
  }

 private:
  bool put(int64_t word) {
    if (size == kMaxWords) return false;
    words[size++] = word;
    return true;
  }

  bool add_text(PyObject *value) {
    Py_ssize_t length = 0;
    const char *text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == nullptr) PyErr_Clear();
    if (text == nullptr || length > kMaxText || size + length / 8 + 2 > kMaxWords) return false;
    words[size++] = length;
    words[size + length / 8] = 0;
    std::memcpy(&words[size], text, length);
    size += int32_t(length / 8 + 1);
    return true;
  }

  bool add_tensor(PyObject *tensor) {
    Owned number{got(get_cdata, tensor)};
    const void *cdata = number == nullptr ? nullptr : PyLong_AsVoidPtr(number);
    if (cdata == nullptr || tensors == kMaxTensors || !put(1)) {  // no class has that address
      PyErr_Clear();
      return false;
    }
    Read &found = read[tensors++];
    found.tensor = tensor;
    const int32_t more = read_tensor(cdata, words + size, kMaxWords - size, &found.address, &found.device_type);
    if (more < 0) return false;
    size += more;
    return true;
  }
};

// Room for words, given back at the end of its scope: too large for the stack of some threads. A finalizer that Python runs
// meanwhile gets another one.
class Scratch {
 public:
  Scratch() {
    if (spare().empty()) {
      words = new Words;
    } else {
      words = spare().back();
      spare().pop_back();
      words->size = words->tensors = 0;
    }
  }
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;
  ~Scratch() { spare().push_back(words); }
  Words &operator*() const { return *words; }

 private:
  Words *words;
  static std::vector<Words *> &spare() {
    static std::vector<Words *> list;
    return list;
  }
};

struct Remembered {
  uint64_t hash;
  std::vector<int64_t> words;
  PyObject *description;
};
Remembered descriptions[kRemembered];

// The description of what looks like this, borrowed; a null pointer where none is remembered.
PyObject *remembered(const Words &like, uint64_t hash) {
  const Remembered &one = descriptions[hash % kRemembered];
  if (one.description == nullptr || one.hash != hash || one.words.size() != size_t(like.size)) return nullptr;
  return std::memcmp(one.words.data(), like.words, like.size * sizeof(int64_t)) == 0 ? one.description : nullptr;
}

void remember(const Words &like, uint64_t hash, PyObject *description) {
  Remembered &one = descriptions[hash % kRemembered];
  PyObject *old = one.description;
  one.hash = hash;
  one.words.assign(like.words, like.words + like.size);
  one.description = Py_NewRef(description);
  Py_XDECREF(old);
}

struct Site {  // the number of a site, by the objects that tell it
  PyObject *parts[4];
  PyObject *number;
};
Site sites[kRemembered];

Site &site_of(PyObject *const *parts) {
  uint64_t hash = 0;
  for (int i = 0; i < 4; ++i) hash = ((hash ^ reinterpret_cast<uint64_t>(parts[i])) * 0xff51afd7ed558ccdull) >> 4;
  return sites[hash % kRemembered];
}

// Forget everything: other tools have other sites.
void forget_all() {
  for (Remembered &one : descriptions) {
    Py_CLEAR(one.description);
    std::vector<int64_t>().swap(one.words);
  }
  for (Site &site : sites) {
    Py_CLEAR(site.number);
    for (PyObject *&part : site.parts) Py_CLEAR(part);
  }
}

// (args, kwargs, tensors): what is remembered of arguments like these, with their tensors in the list; None where nothing is.
PyObject *recall(PyObject *, PyObject *const *given, Py_ssize_t count) {
  if (count != 3 || !PyTuple_Check(given[0]) || !PyDict_Check(given[1]) || !PyList_Check(given[2])) {
    PyErr_SetString(PyExc_TypeError, "recall takes a tuple, a dict and a list");
    return nullptr;
  }
  const Scratch room;
  Words &like = *room;
  PyObject *found = nullptr;
  if (read_tensor != nullptr && like.add_all(given[0], given[1])) found = remembered(like, like.hash());
  if (found == nullptr) Py_RETURN_NONE;
  for (int32_t i = 0; i < like.tensors; ++i)
    if (PyList_Append(given[2], like.read[i].tensor) < 0) return nullptr;
  return Py_NewRef(found);
}

// (args, kwargs, description): remember what arguments like these look like.
PyObject *retain(PyObject *, PyObject *const *given, Py_ssize_t count) {
  if (count != 3 || !PyTuple_Check(given[0]) || !PyDict_Check(given[1])) {
    PyErr_SetString(PyExc_TypeError, "retain takes a tuple, a dict and a description");
    return nullptr;
  }
  const Scratch room;
  Words &like = *room;
  if (plans != nullptr && read_tensor != nullptr && like.add_all(given[0], given[1])) remember(like, like.hash(), given[2]);
  Py_RETURN_NONE;
}

// (address of what reads a tensor or 0 where nothing does, the class of tensors in C++, classes of constants, of devices)
PyObject *set_reader(PyObject *, PyObject *args) {
  PyObject *address, *base, *types, *devices;
  if (!PyArg_ParseTuple(args, "OOOO!", &address, &base, &types, &PyType_Type, &devices)) return nullptr;
  void *function = PyLong_AsVoidPtr(address);
  PyObject *getter = PyErr_Occurred() ? nullptr : PyObject_GetAttrString(base, "_cdata");
  if (getter == nullptr) return nullptr;
  if (Py_TYPE(getter)->tp_descr_get == nullptr) {
    Py_DECREF(getter);
    PyErr_SetString(PyExc_AttributeError, "_cdata of tensors is not a descriptor");
    return nullptr;
  }
  get_cdata = getter;
  constant_types = Py_NewRef(types);
  device_class = reinterpret_cast<PyTypeObject *>(Py_NewRef(devices));
  read_tensor = reinterpret_cast<ReadTensor>(function);
  Py_RETURN_NONE;
}
