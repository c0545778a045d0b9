// Additions that the autograd engine makes itself: gradients of a tensor that several nodes use, and `.grad += new`.
// A weight that autocast has cast for several calls gets the sum of their gradients through one conversion.
// PyTorch tells its profilers of operators; those that the engine runs are handed to Python, before and after.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

struct Place {  // a node, by the thread that made it and its number there
  uint64_t thread;
  int64_t sequence;
};

struct Sum {
  const char* kernel;          // "add_"; "to" for a conversion
  int64_t accumulates;         // into `.grad`; otherwise in the engine, between two nodes
  const at::Tensor* total;     // what there was so far; of a copy, where it goes
  const at::Tensor* added;     // null for a clone and a conversion
  const at::Tensor* variable;  // the leaf that it is the gradient of, or null
  Place sender;
  Place maker;                 // the node that gets the sum; 0, -1 where it is not known
  const char* sender_name;
};

using Before = int64_t (*)(const Sum*);  // returns a number for `After`, or 0
using After = void (*)(int64_t, const at::Tensor*);

Before before_sum = nullptr;
After after_sum = nullptr;
void* interceptor = nullptr;
bool with_cpu = false;
at::CallbackHandle of_nodes = 0;

std::mutex lock;
std::unordered_set<const void*> sums;  // addresses of what was added up since listening began

thread_local std::vector<Node*> running;  // the nodes that this thread is in, innermost last
thread_local bool busy = false;           // in an addition that was heard, or in Python because of it

struct Heard : public at::ObserverContext {
  explicit Heard(int64_t number, bool is_sum) : number(number), is_sum(is_sum) {}
  int64_t number;
  bool is_sum;
};

// Python code, of hooks for example, calls operators with the interceptor taken off, or with all modes disabled.
bool called_by_python() {
  using at::impl::PythonTorchFunctionTLS;
  if (PythonTorchFunctionTLS::get_disabled_state() == at::impl::TorchFunctionDisabledState::ALL_DISABLED) return true;
  for (int64_t i = PythonTorchFunctionTLS::stack_len(); i-- > 0;) {
    const auto& mode = PythonTorchFunctionTLS::get_stack_at(i);
    if (mode->ptr(&mode->pyinterpreter()) == interceptor) return false;
  }
  return true;
}

Place place_of(const Node& node) { return {node.thread_id(), static_cast<int64_t>(node.sequence_nr())}; }

// The leaf that a node leads to, if it is one or converts a gradient for one.
const AccumulateGrad* leaf_behind(const Node* node) {
  if (node->name() == "ToCopyBackward0" && node->num_outputs() == 1) node = node->next_edge(0).function.get();
  return dynamic_cast<const AccumulateGrad*>(node);
}

// Who gets what a node has sent: the only one that takes a gradient like this, or nobody.
void find_target(Node& sender, const at::Tensor& sent, Sum& sum) {
  const torch::autograd::Edge* found = nullptr;
  for (const auto& edge : sender.next_edges()) {
    if (!edge.is_valid() || edge.input_nr >= edge.function->num_inputs()) continue;
    const auto& expected = edge.function->input_metadata(edge.input_nr);
    if (!expected.is_same_shape(sent)) continue;
    if (found != nullptr && !(*found == edge)) return;
    found = &edge;
  }
  if (found == nullptr) return;
  sum.maker = place_of(*found->function);
  if (const auto* leaf = leaf_behind(found->function.get())) sum.variable = &leaf->variable;
}

// Whether a kernel of a node converts a sum of gradients for a leaf.
bool converts_sum(const at::RecordFunction& function, const AccumulateGrad* leaf) {
  const auto inputs = function.inputs();
  if (leaf == nullptr || inputs.empty() || !inputs[0].isTensor()) return false;
  const at::Tensor& total = inputs[0].toTensor();
  if (!total.has_storage() || total.device() != leaf->variable.device()) return false;
  const std::lock_guard<std::mutex> held(lock);
  return sums.count(total.const_data_ptr()) > 0;
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  if (busy) return nullptr;
  const char* name = function.name();
  if (std::strncmp(name, "aten::", 6) != 0) return nullptr;
  name += 6;
  const bool adds = std::strcmp(name, "add_") == 0 || std::strcmp(name, "add") == 0;
  const bool converts = std::strcmp(name, "_to_copy") == 0;
  if (!adds && !converts && std::strcmp(name, "copy_") != 0 && std::strcmp(name, "clone") != 0) return nullptr;
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return nullptr;
  const bool in_node = !running.empty() && running.back() == node.get();
  if (!in_node && !adds) return nullptr;
  const auto* leaf = !in_node ? nullptr : converts ? leaf_behind(node.get()) : dynamic_cast<AccumulateGrad*>(node.get());
  if (in_node && (leaf == nullptr || (converts && !converts_sum(function, leaf)))) return nullptr;
  if (called_by_python()) return nullptr;
  try {
    const auto inputs = function.inputs();
    if (inputs.empty() || !inputs[0].isTensor()) return nullptr;
    const bool one = converts || std::strcmp(name, "clone") == 0;
    if (!one && (inputs.size() < 2 || !inputs[1].isTensor())) return nullptr;
    const at::Tensor& total = inputs[0].toTensor();
    const at::Tensor& added = inputs[one ? 0 : 1].toTensor();
    if (!total.defined() || !added.defined() || total.is_meta() || (total.is_cpu() && added.is_cpu() && !with_cpu))
      return nullptr;
    const std::string sender = node->name();
    Sum sum{converts ? "to" : name, in_node, &total, one ? nullptr : &added, nullptr, place_of(*node), {0, -1}, sender.c_str()};
    if (in_node) {
      sum.variable = &leaf->variable;
    } else {
      find_target(*node, added, sum);
    }
    busy = true;
    const int64_t number = before_sum(&sum);
    if (number != 0) return std::make_unique<Heard>(number, !in_node);  // what runs inside of it is a part of it
  } catch (...) {  // the training goes on
  }
  busy = false;
  return nullptr;
}

void after_operator(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* heard = static_cast<Heard*>(context);
  if (heard == nullptr) return;
  const auto& outputs = function.outputs();  // none where the kernel failed
  const at::Tensor* result = !outputs.empty() && outputs[0].isTensor() ? &outputs[0].toTensor() : nullptr;
  if (heard->is_sum && result != nullptr && result->has_storage()) {
    const std::lock_guard<std::mutex> held(lock);
    sums.insert(result->const_data_ptr());
  }
  after_sum(heard->number, result);
  busy = false;
}

// PyTorch packs up the arguments and results of every operator that somebody listens to, which takes longer than all that
// is done with the few that are wanted. So a thread listens only where the graph says that the engine may add.
struct Pass {
  enum { kSends = 1, kHeard = 2 };
  // After those that send, the engine may add: somebody else sends to the same place. What others do inside is heard: they
  // put a gradient into `.grad`, or convert a sum for it.
  ska::flat_hash_map<const Node*, int> nodes;
};

bool is_conversion(const Node& node) {
  static std::atomic<const std::type_info*> known{nullptr};
  const std::type_info* conversion = known;
  if (conversion != nullptr) return *conversion == typeid(node);
  if (node.name() != "ToCopyBackward0") return false;
  known = &typeid(node);
  return true;
}

Pass pass_from(Node* first) {
  using Slot = std::pair<Node*, uint32_t>;
  struct Hash {
    size_t operator()(const Slot& slot) const { return (reinterpret_cast<size_t>(slot.first) >> 4) * 31 + slot.second; }
  };
  Pass pass;
  ska::flat_hash_map<Slot, const Node*, Hash> slots;  // who sends there first; null where several do
  ska::flat_hash_set<const Node*> seen;
  std::vector<Node*> todo{first}, conversions;
  seen.insert(first);
  while (!todo.empty()) {
    Node* node = todo.back();
    todo.pop_back();
    if (node->num_outputs() == 0 && dynamic_cast<AccumulateGrad*>(node) != nullptr) pass.nodes[node] |= Pass::kHeard;
    else if (is_conversion(*node)) conversions.push_back(node);
    for (const auto& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      const auto slot = slots.emplace(Slot{edge.function.get(), edge.input_nr}, node);
      if (!slot.second) {
        if (slot.first->second != nullptr) pass.nodes[slot.first->second] |= Pass::kSends;
        slot.first->second = nullptr;
        pass.nodes[node] |= Pass::kSends;
      }
      if (seen.insert(edge.function.get()).second) todo.push_back(edge.function.get());
    }
  }
  for (Node* node : conversions) {
    const auto slot = slots.find({node, 0});
    if (slot != slots.end() && slot->second == nullptr && leaf_behind(node) != nullptr) pass.nodes[node] |= Pass::kHeard;
  }
  return pass;
}

std::unordered_map<int, std::shared_ptr<const Pass>> passes;  // that are under way, by the engine's number
std::atomic<int> listenings{0};

// What is known of a node in the pass that is under way.
int known_of(Node* node) {
  thread_local std::shared_ptr<const Pass> latest;
  thread_local int latest_number = -1, latest_listening = -1;
  const int number = torch::autograd::get_current_graph_task_id();
  if (number < 0) return 0;
  if (number != latest_number || latest_listening != listenings) {
    const int listening = listenings;
    std::shared_ptr<const Pass> pass;
    {
      const std::lock_guard<std::mutex> held(lock);
      const auto found = passes.find(number);
      if (found != passes.end()) pass = found->second;
    }
    if (pass == nullptr) {
      // Nodes run after all that send to them. To ask a node of the user's own for its name takes the GIL, whose holder may
      // wait for our lock: so we do not hold it.
      pass = std::make_shared<const Pass>(pass_from(node));
      const std::lock_guard<std::mutex> held(lock);
      if (listening == listenings) pass = passes.emplace(number, pass).first->second;
    }
    latest = pass;
    latest_number = number;
    latest_listening = listening;
  }
  const auto found = latest->nodes.find(node);
  return found == latest->nodes.end() ? 0 : found->second;
}

// From here to the end of what the engine does with the present node: it gives its threads their state anew for each.
void listen() {
  at::addThreadLocalCallback(at::RecordFunctionCallback(before_operator, after_operator)
                                 .needsInputs(true)
                                 .needsOutputs(true)
                                 .scopes({at::RecordScope::FUNCTION}));
}

struct Running : public at::ObserverContext {
  bool sends = false;
};

std::unique_ptr<at::ObserverContext> before_node(const at::RecordFunction& function) {
  auto made = std::make_unique<Running>();
  const auto node = torch::autograd::get_current_node();
  running.push_back(node.get());
  try {
    if (node == nullptr || function.seqNr() != static_cast<int64_t>(node->sequence_nr())) return made;  // a hook called it
    const int known = known_of(node.get());
    made->sends = (known & Pass::kSends) != 0;
    if (known & Pass::kHeard) listen();
  } catch (...) {  // the training goes on
  }
  return made;
}

void after_node(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  if (!running.empty()) running.pop_back();
  if (static_cast<Running*>(context)->sends) listen();
}

using Wrap = struct _object* (*)(const at::TensorBase&);

// Its name says how it takes its argument, which in either case is the address of a tensor.
Wrap find_wrap() {
  void* library = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* found = dlsym(library, "_Z16THPVariable_WrapRKN2at10TensorBaseE");
  if (found == nullptr) found = dlsym(library, "_Z16THPVariable_WrapN2at10TensorBaseE");
  return reinterpret_cast<Wrap>(found);
}

Wrap wrap = nullptr;

}  // namespace

extern "C" {

// Returns 0 where tensors cannot be handed to Python.
__attribute__((visibility("default"))) int op_tools_sums_prepare(void* mode, Before before, After after) {
  wrap = find_wrap();
  interceptor = mode;
  before_sum = before;
  after_sum = after;
  return wrap != nullptr ? 1 : 0;
}

// Begins to listen; passes may run at the same time in several threads, but this is called once for all of them.
__attribute__((visibility("default"))) int op_tools_sums_begin(int include_cpu) {
  with_cpu = include_cpu != 0;
  {
    const std::lock_guard<std::mutex> held(lock);
    sums.clear();
    passes.clear();
    ++listenings;
  }
  try {
    of_nodes = at::addGlobalCallback(
        at::RecordFunctionCallback(before_node, after_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  } catch (...) {
    return 0;
  }
  return 1;
}

__attribute__((visibility("default"))) void op_tools_sums_end() {
  at::removeCallback(of_nodes);
  const std::lock_guard<std::mutex> held(lock);
  passes.clear();
}

__attribute__((visibility("default"))) uint64_t op_tools_sums_thread() { return at::RecordFunction::currentThreadId(); }

// A Python tensor over the same memory, so that the engine's own gets no second owner; the caller holds the GIL.
__attribute__((visibility("default"))) struct _object* op_tools_sums_tensor(const at::Tensor* tensor) {
  if (tensor->key_set().has(c10::DispatchKey::Python)) return wrap(at::Tensor(*tensor));
  return wrap(tensor->tensor_data());
}

}  // extern "C"
