// The gradients that pass through a call: hooks on the nodes of autograd between its results and its inputs, without Python.
// Only for calls that write to none of their arguments; `watch/backward.py` does the same for all others.

#pragma once

#include "python_tensors.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <memory>
#include <typeindex>
#include <utility>

namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);  // not the same class in all versions

std::unordered_map<std::type_index, bool> passes_on;  // whether nodes of a class only move or convert a gradient
std::vector<std::string> passing;                     // names of those classes

void set_passing(PyObject *names) {
  passes_on.clear();
  passing.clear();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) passing.emplace_back(PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, i)));
}

// Most calls have few tensors, and most nodes few edges: no memory is taken for these.
using Tensors = c10::SmallVector<at::Tensor, 4>;
using SomeTensors = c10::ArrayRef<at::Tensor>;

struct Wider {
  at::ScalarType dtype = at::ScalarType::Undefined;
  TensorImpl *leaf = nullptr;  // that gets it, if there is one
};

// A call whose backward is awaited.
struct AwaitedCall {
  size_t nodes = 0, heard = 0;
  bool queued = false, stand_ins = false;
  Tensors grad_outputs, grad_inputs;
  c10::SmallVector<Wider, 4> wider;  // of gradients that are converted after they have left the call
  std::vector<std::vector<const void *>> passed_on;  // by result, where there are stand-ins
  virtual ~AwaitedCall() = default;

  // The gradients of its results and of its inputs, once all of its nodes have run; some may be undefined.
  virtual void told(SomeTensors outputs, SomeTensors inputs, c10::ArrayRef<Wider> becomes) = 0;
  // What went wrong while its backward was heard; the pass goes on.
  virtual void failed(PyObject *error) = 0;

  template <typename Function>
  void run(Function function) {
    guarded([this](PyObject *error) { failed(error); }, function);
  }

  static at::Tensor in_its_dtype(const at::Tensor &grad, const Wider &as) {
    return as.dtype == at::ScalarType::Undefined ? grad : grad.to(as.dtype);
  }

  void finish() {
    if (heard == 0) return;
    heard = 0;
    queued = false;
    Tensors outputs(grad_outputs.size()), inputs(grad_inputs.size());
    outputs.swap(grad_outputs);
    inputs.swap(grad_inputs);
    c10::SmallVector<Wider, 4> becomes(wider.size());
    becomes.swap(wider);
    told(outputs, inputs, becomes);
  }
};

struct Target {  // an edge over which gradients leave a call, and the nodes on the way to the inputs that have no hook
  size_t edge;
  c10::SmallVector<int, 2> inputs;
  bool to_leaf;
  c10::SmallVector<NodePointer, 1> through;
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
  std::shared_ptr<AwaitedCall> state;
  c10::SmallVector<Target, 2> targets;
  c10::SmallVector<std::pair<uint32_t, size_t>, 1> sources;  // output number of the node, result of the call
  std::vector<StandIn> stand_ins;

  variable_list operator()(const variable_list &to_inputs, const variable_list &from_outputs) override {
    const auto gil = PyGILState_Ensure();
    state->run([&] {
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
    AwaitedCall &call = *state;
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
        state->run([&] { state->finish(); });
        PyGILState_Release(gil);
      });
    }
  }
};

using Edge = std::pair<Node *, uint32_t>;
constexpr size_t kFew = 8;  // nodes that are looked through one by one

struct Attaching {
  const SomeTensors given;
  uint64_t since;
  c10::SmallVector<std::pair<Edge, int>, 4> targets;         // of inputs, in order
  c10::SmallVector<std::pair<TensorImpl *, int>, 4> leaves;  // of inputs, in order

  Attaching(SomeTensors inputs, uint64_t since) : given(inputs), since(since) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].requires_grad()) continue;
      NodePointer node;
      try {
        node = inputs[i].grad_fn();
      } catch (const std::exception &) {  // a view whose base was changed in place: nothing can come to it
        continue;
      }
      if (node) targets.push_back({{node.get(), inputs[i].output_nr()}, int(i)});
      else leaves.push_back({inputs[i].unsafeGetTensorImpl(), int(i)});
    }
    std::sort(targets.begin(), targets.end());
    std::sort(leaves.begin(), leaves.end());
  }

  template <typename Pairs, typename Key>
  static c10::SmallVector<int, 2> those_of(const Pairs &pairs, const Key &key) {
    c10::SmallVector<int, 2> found;
    for (auto at = std::lower_bound(pairs.begin(), pairs.end(), std::make_pair(key, -1)); at != pairs.end() && at->first == key; ++at)
      found.push_back(at->second);
    return found;
  }
  bool is_input(const Edge &edge) const {
    auto at = std::lower_bound(targets.begin(), targets.end(), std::make_pair(edge, -1));
    return at != targets.end() && at->first == edge;
  }
  bool is_input(Node *node) const {
    auto first = std::lower_bound(targets.begin(), targets.end(), std::make_pair(Edge{node, 0}, -1));
    return first != targets.end() && first->first.first == node;
  }

  // Whether an edge ends here: at inputs, or at a leaf that is none.
  bool ends(const torch::autograd::Edge &edge, Target &target) const {
    target.inputs = those_of(targets, Edge{edge.function.get(), edge.input_nr});
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
    auto found = passes_on.find(type);
    if (found != passes_on.end()) return found->second;
    const std::string name = node.name();
    return passes_on[type] = std::find(passing.begin(), passing.end(), name) != passing.end();
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
void attach(const std::shared_ptr<AwaitedCall> &state, SomeTensors inputs, SomeTensors outputs, uint64_t since) {
  const Attaching graph(inputs, since);
  if (graph.targets.empty() && graph.leaves.empty()) return;
  c10::SmallVector<std::pair<NodePointer, std::unique_ptr<Hook>>, 4> found;
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
      Target target;
      target.edge = own;
      target.to_leaf = false;
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
  // No stand-ins where other results of the call send gradients as well: attention weights, and what they weigh.
  const auto senders = [&](const Edge &to) {
    size_t count = 0;
    for (const auto &[node, hook] : found)
      for (const auto &edge : node->next_edges()) count += edge.is_valid() && Edge{edge.function.get(), edge.input_nr} == to;
    return count;
  };
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].grad_fn() || !outputs[i].is_view()) continue;
    const auto &base = outputs[i]._base();
    const auto node = base.grad_fn();
    if (!node || node == outputs[i].grad_fn() || node->sequence_nr() < since || known(node.get()) == nullptr) continue;
    const bool whole = outputs[i].numel() == base.numel() && base.is_contiguous() && outputs[i].scalar_type() == base.scalar_type();
    const Edge made{node.get(), uint32_t(base.output_nr())};
    if (!whole || graph.is_input(made) || senders(made) > 1) continue;
    hook_of(node).stand_ins.push_back({uint32_t(base.output_nr()), i, outputs[i].sizes().vec(), outputs[i].strides().vec(),
                                       outputs[i].storage_offset() - base.storage_offset()});
    state->stand_ins = true;
  }
  state->nodes = found.size();
  state->grad_outputs.resize(outputs.size());
  state->grad_inputs.resize(inputs.size());
  state->wider.resize(inputs.size());
  if (state->stand_ins) state->passed_on.resize(outputs.size());
  for (auto &[node, hook] : found) node->add_post_hook(std::move(hook));
}

// Arguments of a call that is under way, and which number the next node of this thread gets.
struct Begun {
  Tensors inputs;
  uint64_t since = 0;
};

// A capsule with what is known before a call; None where Python must watch it, since there are hooks on saved tensors.
PyObject *begin_call(PyObject *tensors) {
  if (at::GradMode::is_enabled() && !at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) Py_RETURN_NONE;
  auto begun = std::make_unique<Begun>();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) begun->inputs.push_back(unwrapped(PyList_GET_ITEM(tensors, i)));
  begun->since = at::sequence_number::peek();
  PyObject *made = PyCapsule_New(begun.get(), nullptr, [](PyObject *capsule) {
    delete static_cast<Begun *>(PyCapsule_GetPointer(capsule, nullptr));
  });
  if (made != nullptr) begun.release();
  return made;
}

Begun &begun_in(PyObject *capsule) {
  auto *begun = static_cast<Begun *>(PyCapsule_GetPointer(capsule, nullptr));
  if (begun == nullptr) throw PythonError{};
  return *begun;
}

}  // namespace
