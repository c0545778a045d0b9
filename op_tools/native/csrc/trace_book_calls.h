// Calls that are recorded without any Python code: where in the model one is made, and what its backward sends.
// Only calls that write to none of their arguments come here; `watch/backward.py` does the same for all others.
// Included by trace_book.cpp.

using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);  // not the same class in all versions

// What all calls share; filled by `Book.set_up`.
struct Shared {
  PyObject *module_call, *kind_of_code, *module_of, *texts, *text_of, *arguments, *argument_texts, *find_region,
      *saved_hooks;
  std::unordered_map<PyObject *, int> kinds;                           // of code objects, which are kept alive
  std::unordered_map<PyObject *, std::pair<PyObject *, int>> modules;  // parts of models: a weak reference, a number
  std::unordered_map<int64_t, int> regions;
  std::unordered_map<std::type_index, bool> passes_on;  // whether nodes of a class only move or convert a gradient
  std::vector<std::string> passing;
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

struct Wider {
  at::ScalarType dtype = at::ScalarType::Undefined;
  TensorImpl *leaf = nullptr;  // that gets it, if there is one
};

struct CallState {
  HeldBook held;
  int name, location, step, module;
  int64_t forward;
  size_t nodes = 0, heard = 0;
  bool queued = false, stand_ins = false;
  std::vector<at::Tensor> grad_outputs, grad_inputs;
  std::vector<Wider> wider;  // of gradients that are converted after they have left the call
  std::vector<std::vector<const void *>> passed_on;
  ~CallState() {
    if (!Py_IsInitialized()) return;
    const auto gil = PyGILState_Ensure();
    Py_DECREF(held.object);
    PyGILState_Release(gil);
  }

  static at::Tensor in_its_dtype(const at::Tensor &grad, const Wider &as) {
    return as.dtype == at::ScalarType::Undefined ? grad : grad.to(as.dtype);
  }

  void finish() {
    if (heard == 0) return;
    heard = 0;
    queued = false;
    Book &book = *held.book;
    variable_list outputs(grad_outputs.size()), inputs(grad_inputs.size());
    outputs.swap(grad_outputs);
    inputs.swap(grad_inputs);
    std::vector<Wider> becomes(wider.size());
    becomes.swap(wider);
    if (book.closed) return;
    book.last_module = module;
    const int64_t op = book.add_operator(step, kBackward, name, module, location, 0, 0, region_now(), stream_now(), 0, forward);
    for (size_t i = 0; i < outputs.size(); ++i)
      if (outputs[i].defined())
        book.edge(op, kInput, int64_t(i), book.number(outputs[i], outputs[i], nullptr, -1, -1, 0, -1, false, true));
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].defined()) continue;
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

struct Target {  // an edge over which gradients leave a call, and the nodes on the way to the inputs that have no hook
  size_t edge;
  std::vector<int> inputs;
  bool to_leaf;
  std::vector<NodePointer> through;
  at::ScalarType dtype = at::ScalarType::Undefined;  // of those inputs
  c10::DeviceType device = c10::DeviceType::CPU;
  TensorImpl *leaf = nullptr;
};

bool is_cast(const Node &node) {
  static const std::type_index *cast = nullptr;  // under the GIL
  if (cast != nullptr) return *cast == std::type_index(typeid(node));
  if (node.name() != "ToCopyBackward0") return false;
  cast = new std::type_index(typeid(node));
  return true;
}

// Whether a conversion would only add zeros to each element.
bool only_widens(const at::Tensor &grad, const Target &target) {
  const auto from = grad.scalar_type(), to = target.dtype;
  const bool half = from == at::kBFloat16 || from == at::kHalf;
  return ((half && (to == at::kFloat || to == at::kDouble)) || (from == at::kFloat && to == at::kDouble)) &&
         grad.device().type() == target.device && grad.is_non_overlapping_and_dense();
}
struct StandIn {  // of a node that made what a result is a whole view of
  uint32_t output;
  size_t index;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
};

// What a hook calls is no addition of the engine's own: `gradient_sums.cpp` looks at this.
struct Quiet {
  using TLS = at::impl::PythonTorchFunctionTLS;
  at::impl::TorchFunctionDisabledState before = TLS::get_disabled_state();
  Quiet() { TLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED); }
  ~Quiet() { TLS::set_disabled_state(before); }
};

struct Hook : public torch::autograd::FunctionPostHook {
  std::shared_ptr<CallState> state;
  std::vector<Target> targets;
  std::vector<std::pair<uint32_t, size_t>> sources;  // output number of the node, result of the call
  std::vector<StandIn> stand_ins;

  variable_list operator()(const variable_list &to_inputs, const variable_list &from_outputs) override {
    const auto gil = PyGILState_Ensure();
    state->held.book->guarded(state->name, [&] {
      const at::NoGradGuard no_grad;
      const Quiet quiet;
      hear(to_inputs, from_outputs);
    });
    PyGILState_Release(gil);
    return to_inputs;
  }
  // With compiled autograd the pass is one function, which is left alone. One of the two is that of this PyTorch.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const {}
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) {}

  void hear(const variable_list &to_inputs, const variable_list &from_outputs) {
    CallState &call = *state;
    for (const auto &[output, index] : sources) {
      if (output >= from_outputs.size()) continue;
      call.grad_outputs[index] = from_outputs[output];
      if (!call.stand_ins) continue;
      for (const auto &grad : to_inputs)
        if (grad.defined() && grad.has_storage()) call.passed_on[index].push_back(grad.const_data_ptr());
    }
    for (const auto &one : stand_ins) {
      if (one.output >= from_outputs.size() || !from_outputs[one.output].defined()) continue;
      const auto &grad = from_outputs[one.output];
      const auto &passed = call.passed_on[one.index];
      // the same as what came to the result, or all there is if that was changed in place
      if (!grad.has_storage() || std::find(passed.begin(), passed.end(), grad.const_data_ptr()) == passed.end())
        call.grad_outputs[one.index] = grad.contiguous().as_strided(one.sizes, one.strides, one.offset);
    }
    for (const auto &target : targets) {
      if (target.edge >= to_inputs.size() || !to_inputs[target.edge].defined()) continue;
      at::Tensor grad = to_inputs[target.edge];
      Wider becomes;
      for (const auto &node : target.through) {
        if (is_cast(*node) && only_widens(grad, target)) becomes = {target.dtype, target.leaf};
        else grad = (*node)(variable_list{grad})[0];
      }
      if (target.to_leaf) grad = grad.detach();  // a gradient that somebody else holds would be copied into `.grad`
      for (int index : target.inputs) {
        at::Tensor &there = call.grad_inputs[index];
        Wider &as = call.wider[index];
        if (!there.defined()) {
          there = grad;
          as = becomes;
          continue;
        }
        there = call.in_its_dtype(there, as).add(call.in_its_dtype(grad, becomes));
        as = {};
      }
    }
    if (++call.heard >= call.nodes) {
      call.finish();
    } else if (!call.queued) {  // some nodes may never run: the end of the pass is then the end
      call.queued = true;
      torch::autograd::Engine::get_default_engine().queue_callback([state = state] {
        const auto gil = PyGILState_Ensure();
        state->held.book->guarded(state->name, [&] { state->finish(); });
        PyGILState_Release(gil);
      });
    }
  }
};

using Edge = std::pair<Node *, uint32_t>;
constexpr size_t kFew = 8;  // nodes that are looked through one by one

struct Attaching {
  const variable_list &given;
  uint64_t since;
  std::vector<std::pair<Edge, int>> targets;         // of inputs, in order: most calls have few
  std::vector<std::pair<TensorImpl *, int>> leaves;  // of inputs, in order

  Attaching(const variable_list &inputs, uint64_t since) : given(inputs), since(since) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].requires_grad()) continue;
      const auto &node = inputs[i].grad_fn();
      if (node) targets.push_back({{node.get(), inputs[i].output_nr()}, int(i)});
      else leaves.push_back({inputs[i].unsafeGetTensorImpl(), int(i)});
    }
    std::sort(targets.begin(), targets.end());
    std::sort(leaves.begin(), leaves.end());
  }

  template <typename Key>
  static std::vector<int> those_of(const std::vector<std::pair<Key, int>> &pairs, const Key &key) {
    std::vector<int> found;
    for (auto at = std::lower_bound(pairs.begin(), pairs.end(), std::make_pair(key, -1)); at != pairs.end() && at->first == key; ++at)
      found.push_back(at->second);
    return found;
  }
  bool is_input(const Edge &edge) const { return !those_of(targets, edge).empty(); }
  bool is_input(Node *node) const {
    auto first = std::lower_bound(targets.begin(), targets.end(), std::make_pair(Edge{node, 0}, -1));
    return first != targets.end() && first->first.first == node;
  }

  // Whether an edge ends here: at inputs, or at a leaf that is none.
  bool ends(const torch::autograd::Edge &edge, Target &target) const {
    target.inputs = those_of(targets, {edge.function.get(), edge.input_nr});
    target.to_leaf = false;
    if (target.inputs.empty()) {
      const auto *leaf = dynamic_cast<const torch::autograd::AccumulateGrad *>(edge.function.get());
      if (leaf == nullptr) return false;
      target.to_leaf = true;
      target.leaf = leaf->variable.unsafeGetTensorImpl();
      target.inputs = those_of(leaves, target.leaf);
    }
    if (!target.inputs.empty()) {
      const at::Tensor &input = given[size_t(target.inputs.front())];
      target.dtype = input.scalar_type();
      target.device = input.device().type();
    }
    return true;
  }

  static bool passes(const Node &node) {
    const std::type_index type(typeid(node));
    auto found = shared.passes_on.find(type);
    if (found != shared.passes_on.end()) return found->second;
    const std::string name = node.name();
    return shared.passes_on[type] = std::find(shared.passing.begin(), shared.passing.end(), name) != shared.passing.end();
  }

  // The inputs behind a chain of nodes that pass gradients on, and that chain.
  bool way(NodePointer node, Target &target) const {
    while (passes(*node)) {
      if (node->sequence_nr() < since && node->name() != "ToCopyBackward0") break;  // a cast may be one that autocast kept
      target.through.push_back(node);
      const auto following = node->next_edges().empty() ? torch::autograd::Edge() : node->next_edge(0);
      if (!following.is_valid()) break;
      if (ends(following, target)) return !target.inputs.empty();
      node = following.function;
    }
    target.through.clear();
    return false;
  }
};

// Hook the nodes between the results of a call and its inputs.
void attach(const std::shared_ptr<CallState> &state, const variable_list &inputs, const variable_list &outputs, uint64_t since) {
  const Attaching graph(inputs, since);
  if (graph.targets.empty() && graph.leaves.empty()) return;
  std::vector<std::pair<NodePointer, std::unique_ptr<Hook>>> found;
  Map<Node *, size_t> numbers;  // of those after the first few
  auto known = [&](Node *node) -> Hook * {
    for (size_t i = 0; i < std::min(found.size(), kFew); ++i)
      if (found[i].first.get() == node) return found[i].second.get();
    auto at = found.size() > kFew ? numbers.find(node) : numbers.end();
    return at == numbers.end() ? nullptr : found[at->second].second.get();
  };
  auto hook_of = [&](const NodePointer &node) -> Hook & {
    if (Hook *hook = known(node.get())) return *hook;
    if (found.size() >= kFew) numbers.emplace(node.get(), found.size());
    found.emplace_back(node, std::make_unique<Hook>());
    found.back().second->state = state;
    return *found.back().second;
  };
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto node = outputs[i].grad_fn();
    if (node && !graph.is_input({node.get(), outputs[i].output_nr()}))  // not an input handed back as it is
      hook_of(node).sources.emplace_back(outputs[i].output_nr(), i);
  }
  if (found.empty()) return;
  for (size_t at = 0; at < found.size(); ++at) {
    const auto node = found[at].first;
    size_t number = 0;
    for (const auto &edge : node->next_edges()) {
      const size_t own = number++;
      if (!edge.is_valid()) continue;
      Target target{own, {}, false, {}};
      if (graph.ends(edge, target)) {
        if (!target.inputs.empty()) found[at].second->targets.push_back(std::move(target));
        continue;
      }
      if (Attaching::passes(*edge.function) && graph.way(edge.function, target)) {
        found[at].second->targets.push_back(std::move(target));
        continue;
      }
      if (graph.is_input(edge.function.get()) || edge.function->sequence_nr() < since) continue;
      hook_of(edge.function);
      if (found.size() > 2000) return;
    }
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].grad_fn() || !outputs[i].is_view()) continue;
    const auto &base = outputs[i]._base();
    const auto node = base.grad_fn();
    if (!node || node == outputs[i].grad_fn() || node->sequence_nr() < since || known(node.get()) == nullptr) continue;
    const bool whole = outputs[i].numel() == base.numel() && base.is_contiguous() && outputs[i].scalar_type() == base.scalar_type();
    if (!whole || graph.is_input({node.get(), base.output_nr()})) continue;
    hook_of(node).stand_ins.push_back({base.output_nr(), i, outputs[i].sizes().vec(), outputs[i].strides().vec(),
                                       outputs[i].storage_offset() - base.storage_offset()});
    state->stand_ins = true;
  }
  state->nodes = found.size();
  state->grad_outputs.resize(outputs.size());
  state->grad_inputs.resize(inputs.size());
  state->wider.resize(inputs.size());
  state->passed_on.resize(outputs.size());
  for (auto &[node, hook] : found) node->add_post_hook(std::move(hook));
}
