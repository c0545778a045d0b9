// Sums of gradients that autograd makes itself, recorded without Python where the call that made the tensor was, too.
// `gradient_sums.cpp` hears of them; `watch/sums.py` and the tool do the same for all others. Included by trace_book.cpp.

struct NodePlace {  // as in gradient_sums.cpp
  uint64_t thread;
  int64_t sequence;
};
struct Sum {  // as in gradient_sums.cpp
  const char *kernel;
  int64_t accumulates;
  const at::Tensor *total, *added, *variable;
  NodePlace sender, maker;
  const char *sender_name;
};

using BeforeSum = int64_t (*)(const Sum *);
using AfterSum = void (*)(int64_t, const at::Tensor *);
constexpr int kMaxCounted = 8;  // gradients in a sum; more are not told apart

struct OpenSum {
  std::vector<int64_t> inputs;
  int name, location, step;
  bool in_place;
};

struct KnownSum {  // what a sum is called, and where it is said to be
  PyObject *op;
  int name, location;
};
constexpr size_t kKnownSums = 4096;

struct Sums {  // one for the process, as the callbacks are
  PyObject *object = nullptr;  // the book
  PyObject *watcher = nullptr, *calls = nullptr;  // who knows the step; counts of calls by operator
  BeforeSum before = nullptr;  // of Python, for what is not recorded here
  AfterSum after = nullptr;
  std::unordered_map<int64_t, OpenSum> open;
  std::map<std::tuple<std::string, PyObject *, PyObject *, int>, KnownSum> known;  // by kernel, call (held) and terms
  std::map<std::pair<uint64_t, int64_t>, int> terms;  // in sums of this pass, by who gets them
  int64_t last = 0;
};
Sums sums;

const Made *call_at(const Book &book, uint64_t thread, uint64_t number) {
  auto found = book.calls.find(thread);
  if (found == book.calls.end()) return nullptr;
  const auto &calls = found->second;
  auto at = std::upper_bound(calls.begin(), calls.end(), number, [](uint64_t n, const Made &call) { return n < call.since; });
  return at == calls.begin() || number >= (--at)->now ? nullptr : &*at;
}

// The number of a text that is made here.
int text_number(const std::string &text) {
  Owned made{checked(PyUnicode_FromStringAndSize(text.data(), Py_ssize_t(text.size())))};
  return text_number(made);
}

std::string utf8(PyObject *text) {
  const char *found = PyUnicode_AsUTF8(text);
  if (found == nullptr) throw PythonError{};
  return found;
}

void forget_known_sums() {
  for (auto &[key, sum] : sums.known)
    for (PyObject *one : {std::get<1>(key), std::get<2>(key), sum.op}) Py_DECREF(one);
  sums.known.clear();
}

const KnownSum &known_sum(const Sum &sum, const Made &maker, int count) {
  const auto key = std::make_tuple(std::string(sum.kernel), maker.op, maker.location, std::min(count, kMaxCounted + 1));
  auto found = sums.known.find(key);
  if (found != sums.known.end()) return found->second;
  if (sums.known.size() >= kKnownSums) forget_known_sums();
  const std::string name = std::string("autograd.sum_of_gradients.") + sum.kernel;
  const std::string words = "sum of " + (count <= kMaxCounted ? "" : std::string("more than ")) +
                            std::to_string(std::min(count, kMaxCounted)) + " gradients of the result of ";
  Owned op{checked(PyUnicode_FromString(name.c_str()))};
  const int number = text_number(op), location = text_number(words + utf8(maker.op) + ", " + utf8(maker.location));
  for (PyObject *one : {maker.op, maker.location, op.object}) Py_INCREF(one);
  return sums.known[key] = {op, number, location};
}

// A number for `after_sum`; 0 where Python must record it.
int64_t begin_sum(Book &book, const Sum &sum) {
  const bool plain = !sum.total->key_set().has(c10::DispatchKey::Python) && !(sum.added && sum.added->key_set().has(c10::DispatchKey::Python));
  if (book.closed || sum.variable != nullptr || sum.accumulates || sum.added == nullptr || sum.maker.sequence < 0 || !plain) return 0;
  const Made *maker = call_at(book, sum.maker.thread, uint64_t(sum.maker.sequence));
  if (maker == nullptr) return 0;
  const int count = ++sums.terms[{sum.maker.thread, sum.maker.sequence}] + 1;
  const KnownSum called = known_sum(sum, *maker, count);
  Owned op{Py_NewRef(called.op)}, step{checked(PyObject_GetAttrString(sums.watcher, "step"))};
  PyObject *before = PyDict_GetItemWithError(sums.calls, op);
  Owned calls{checked(PyLong_FromLongLong(1 + (before == nullptr ? 0 : PyLong_AsLongLong(before))))};
  if (PyErr_Occurred() || PyDict_SetItem(sums.calls, op, calls) < 0) throw PythonError{};
  OpenSum open{{}, called.name, called.location, int(PyLong_AsLong(step)), sum.kernel[std::strlen(sum.kernel) - 1] == '_'};
  for (const at::Tensor *tensor : {sum.total, sum.added}) {
    const at::Tensor same = tensor->tensor_data();  // the engine's own gets no second owner
    open.inputs.push_back(book.number(same, same, nullptr, -1, -1, 0, -1, false, true));
    book.print_fresh();
  }
  sums.open.emplace(--sums.last, std::move(open));
  return sums.last;
}

void end_sum(Book &book, int64_t number, const at::Tensor *result) {
  auto found = sums.open.find(number);
  if (found == sums.open.end()) return;
  const OpenSum open = std::move(found->second);
  sums.open.erase(found);
  if (book.closed || result == nullptr) return;  // the kernel raised an error, which the user gets
  const int module = book.last_module;
  const int64_t op = book.add_operator(open.step, kBackward, open.name, module, open.location, 0, 0, region_now(), stream_now(), 0, -1);
  for (size_t i = 0; i < open.inputs.size(); ++i) book.edge(op, kInput, int64_t(i), open.inputs[i]);
  const at::Tensor same = result->tensor_data();
  if (open.in_place && same.has_storage()) book.writers[same.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl()] = op;
  book.edge(op, kOutput, 0, book.number(same, same, nullptr, -1, op, 0, module, open.in_place, true));
  book.allocated(op, module, same, kGradient);
  book.print_fresh();
  book.flush_when_due();
}

int64_t before_sum(const Sum *sum) {
  const auto gil = PyGILState_Ensure();
  int64_t number = 0;
  if (sums.object != nullptr) {
    Owned held{Py_NewRef(sums.object)};
    Book &book = *book_in(held);
    guarded([&](PyObject *error) { book.tell(-1, error); }, [&] { number = begin_sum(book, *sum); });
  }
  if (number == 0 && sums.before != nullptr) number = sums.before(sum);
  PyGILState_Release(gil);
  return number;
}

void after_sum(int64_t number, const at::Tensor *result) {
  const auto gil = PyGILState_Ensure();
  if (number > 0) {
    sums.after(number, result);
  } else if (sums.object != nullptr) {
    Owned held{Py_NewRef(sums.object)};
    Book &book = *book_in(held);
    guarded([&](PyObject *error) { book.tell(-1, error); }, [&] { end_sum(book, number, result); });
  }
  PyGILState_Release(gil);
}

void forget_sums() {
  Py_CLEAR(sums.object);
  Py_CLEAR(sums.watcher);
  Py_CLEAR(sums.calls);
  forget_known_sums();
  sums.open.clear();
  sums.terms.clear();
}
