// Methods of a book that prints tensors on a GPU by itself. Included by trace_book_python.h.

// (launch, function, device, rows, capacity, send, stream of a device): print tensors of this device without Python.
PyObject *book_print_on(PyObject *self, PyObject *args) {
  unsigned long long launch, function, address;
  const char *device;
  long long capacity;
  PyObject *send, *stream;
  if (!PyArg_ParseTuple(args, "KKsKLOO", &launch, &function, &device, &address, &capacity, &send, &stream)) return nullptr;
  return safely([&]() -> PyObject * {
    const c10::Device there{std::string(device)};
    Printer &printer = book_of(self).printer;
    printer.forget();
    printer.streams.type = there.type();
    printer.streams.index = there.index();
    printer.function = reinterpret_cast<void *>(function);
    printer.address = int64_t(address);
    printer.capacity = capacity;
    printer.send = Py_NewRef(send);
    printer.streams.raw_stream = Py_NewRef(stream);
    printer.launch_kernel = reinterpret_cast<LaunchKernel>(launch);
    Py_RETURN_NONE;
  });
}

// (tensors, their numbers, where each begins in a whole): print them now; whether each can be.
PyObject *book_print(PyObject *self, PyObject *args) {
  PyObject *tensors, *numbers, *places;
  if (!PyArg_ParseTuple(args, "O!O!O!", &PyList_Type, &tensors, &PyList_Type, &numbers, &PyList_Type, &places)) return nullptr;
  return safely([&]() -> PyObject * {
    Printer &printer = book_of(self).printer;
    Owned taken{checked(PyList_New(0))};
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
      if (i >= std::min(PyList_GET_SIZE(numbers), PyList_GET_SIZE(places))) break;
      const long long number = PyLong_AsLongLong(PyList_GET_ITEM(numbers, i));
      const long long first = PyLong_AsLongLong(PyList_GET_ITEM(places, i));
      if (PyErr_Occurred()) throw PythonError{};
      const bool can = printer.take(unwrapped(PyList_GET_ITEM(tensors, i)), number, first);
      if (PyList_Append(taken, can ? Py_True : Py_False) < 0) throw PythonError{};
    }
    printer.launch();
    return Py_NewRef(taken);
  });
}

// The tensors whose rows are on the device: their numbers, their first rows and the end, their first chunks of a whole, and
// the streams that were used.
PyObject *book_take_printed(PyObject *self, PyObject *) {
  Printer &printer = book_of(self).printer;
  const size_t count = printer.starts.size();
  printer.starts.push_back(printer.used);
  Owned numbers{bytes_of(printer.numbers, count)}, starts{bytes_of(printer.starts, count + 1)};
  Owned chunks{bytes_of(printer.chunks, count)}, streams{bytes_of(printer.used_streams, printer.used_streams.size())};
  printer.numbers.erase(printer.numbers.begin(), printer.numbers.begin() + long(count));
  printer.chunks.erase(printer.chunks.begin(), printer.chunks.begin() + long(count));
  printer.starts.clear();
  printer.used_streams.clear();
  printer.used = 0;
  if (numbers == nullptr || starts == nullptr || chunks == nullptr || streams == nullptr) return nullptr;
  return PyTuple_Pack(4, numbers.object, starts.object, chunks.object, streams.object);
}
