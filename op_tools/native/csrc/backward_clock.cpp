// Times of calls and of their backward passes: device events around calls (which `front_light.h` asks for) and around the
// autograd nodes that they made, recorded in C++ by the thread that runs them. Python asks for the times afterwards, once
// the device has passed the second event.

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

constexpr size_t kMostHeard = 1 << 20;  // nobody listens any more, in a forked process for instance

struct Span {
  uint64_t thread;    // that ran the forward pass, in PyTorch's numbering
  int64_t sequence;   // number of the node in that thread
  int64_t runner;     // thread that ran the node, in the system's numbering
  int64_t light;      // no kernel runs in it, so it has no events
  int64_t began;      // nanoseconds of the host's clock
  int64_t ended;
  c10::Event* first;  // null where the host's clock must do
  c10::Event* last;
};

struct Running : public at::ObserverContext {
  Span span{};
};

// How the backward of a call is timed: by events, by the host's clock, or not at all (on another accelerator).
enum Way : int64_t { kEvents, kHost, kNone };

struct Call {
  int64_t id, site, step, way;
};

struct Made {  // a call, by the numbers of the nodes that it made
  int64_t since, until;
  Call call;
};

struct Timing {
  Call call;
  int64_t backward, thread, began;
  double known;                          // milliseconds, where there are no events
  c10::SmallVector<c10::Event*, 4> events;  // first and last of each stretch, in turns
};

struct Row {  // as `watch/backward_clock.py` reads it
  int64_t id, site, step, backward, thread, began;
  double elapsed;
};

std::mutex lock;
std::vector<Span> heard;
std::map<uint64_t, std::deque<Made>> made;  // by thread, in the order of their nodes; another thread may run these
size_t most_calls = 0;                      // of a thread that may still be run backward
std::deque<Timing> waiting;
std::map<c10::DeviceIndex, std::vector<c10::Event*>> spare;
at::CallbackHandle handle = 0;
bool listening = false;
int64_t listenings = 0;  // how many there have been: a call that ends after the next has begun is not of that one
c10::DeviceType wanted_device = c10::DeviceType::CPU;

// Nodes in which no kernel runs: two events next to each other would still be some microseconds apart, and cost as much.
std::unordered_set<std::string> light_nodes;

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

c10::Event* mark() {
  try {
    const auto type = wanted_device;
    if (type == c10::DeviceType::CPU) return nullptr;
    const c10::impl::VirtualGuardImpl device(type);
    const c10::Stream stream = device.getStream(device.getDevice());
    c10::Event* event = nullptr;
    {
      const std::lock_guard<std::mutex> held(lock);
      auto& free = spare[stream.device_index()];
      if (!free.empty()) {
        event = free.back();
        free.pop_back();
      }
    }
    if (event == nullptr) event = new c10::Event(type, c10::EventFlag::BACKEND_DEFAULT);
    event->record(stream);
    return event;
  } catch (...) {
    return nullptr;  // the training goes on; the host's clock does for this node
  }
}

void give_back_locked(c10::Event* event) {
  if (event != nullptr) spare[event->device_index()].push_back(event);
}

void give_back(c10::Event* event) {
  const std::lock_guard<std::mutex> held(lock);
  give_back_locked(event);
}

// Remember which nodes of this thread a call made.
void note_locked(uint64_t thread, int64_t since, int64_t until, const Call& call) {
  auto& calls = made[thread];
  while (!calls.empty() && calls.back().since >= since) calls.pop_back();
  if (!calls.empty() && calls.back().until > since) calls.back().until = since;
  if (calls.size() >= most_calls) calls.erase(calls.begin(), calls.begin() + long((calls.size() + 1) / 2));
  calls.push_back({since, until, call});
}

const Call* call_at_locked(uint64_t thread, int64_t number) {
  auto found = made.find(thread);
  if (found == made.end()) return nullptr;
  const auto& calls = found->second;
  auto at = std::upper_bound(calls.begin(), calls.end(), number, [](int64_t n, const Made& one) { return n < one.since; });
  return at == calls.begin() || number >= (--at)->until ? nullptr : &at->call;
}

int64_t runner_now() {
  thread_local const int64_t runner = syscall(SYS_gettid);
  return runner;
}

// What was heard of the backward pass of one call.
struct Backward {
  Timing timing;
  int64_t host_ns = 0, light_ns = 0;  // in nodes that run a kernel, and in the others
  bool heavy = false, whole = true;   // some run a kernel; all of these have events
};

void end_locked(Backward& one) {
  Timing& timing = one.timing;
  const bool by_events = timing.call.way == kEvents && one.whole;
  if (!by_events) {
    for (auto* event : timing.events) give_back_locked(event);
    timing.events.clear();
  }
  if (timing.call.way == kNone || (timing.call.way == kEvents && !one.whole)) return;
  if (timing.call.way == kHost) timing.known = double(one.heavy ? one.host_ns : one.light_ns) / 1e6;
  waiting.push_back(std::move(timing));
}

// Milliseconds of a timing whose events the device has passed, -1 where it cannot be known.
double measured(const Timing& timing) {
  double total = timing.known;
  for (size_t i = 0; i < timing.events.size(); i += 2) total += timing.events[i]->elapsedTime(*timing.events[i + 1]);
  return total;
}

// Whether the device has passed the events of a timing, or has now.
bool passed(const Timing& timing, bool wait) {
  for (size_t i = 1; i < timing.events.size(); i += 2) {
    if (wait) timing.events[i]->synchronize();
    else if (!timing.events[i]->query()) return false;
  }
  return true;
}

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& function) {
  if (function.seqNr() < 0) return nullptr;  // no call made it: it puts a gradient into `.grad`
  auto running = std::make_unique<Running>();
  running->span.thread = function.forwardThreadId();
  running->span.sequence = function.seqNr();
  running->span.runner = runner_now();
  running->span.light = light_nodes.count(function.name()) ? 1 : 0;
  running->span.began = now();
  if (!running->span.light) running->span.first = mark();
  return running;
}

void after(const at::RecordFunction&, at::ObserverContext* context) {
  auto* running = static_cast<Running*>(context);
  if (running == nullptr) return;
  Span& span = running->span;
  span.last = span.first == nullptr ? nullptr : mark();
  span.ended = now();
  bool kept = false;
  {
    const std::lock_guard<std::mutex> held(lock);
    if (listening && heard.size() < kMostHeard) {
      heard.push_back(span);
      kept = true;
    }
  }
  if (!kept) {
    give_back(span.first);
    give_back(span.last);
  }
}

}  // namespace

extern "C" {

// The number of this listening; 0 where somebody else listens already, or the device is not known. `light` are names of nodes, by lines; of each
// thread, so many calls at the most are remembered.
__attribute__((visibility("default"))) int op_tools_clock_start(const char* device_type, const char* light, int64_t most) {
  c10::DeviceType device;
  try {
    device = c10::Device(std::string(device_type)).type();
  } catch (...) {
    return 0;
  }
  {
    const std::lock_guard<std::mutex> held(lock);
    if (listening) return 0;
    listening = true;
    ++listenings;
    wanted_device = device;
    if (light_nodes.empty()) {  // once: nodes of an earlier run may still look
      std::istringstream names(light);
      for (std::string name; std::getline(names, name);) light_nodes.insert(name);
    }
    heard.clear();
    waiting.clear();
    made.clear();
    most_calls = size_t(most);
  }
  try {
    handle = at::addGlobalCallback(
        at::RecordFunctionCallback(before, after).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  } catch (...) {
    const std::lock_guard<std::mutex> held(lock);
    listening = false;
    return 0;
  }
  return int(listenings);
}

__attribute__((visibility("default"))) void op_tools_clock_stop() {
  at::removeCallback(handle);
  std::map<c10::DeviceIndex, std::vector<c10::Event*>> left;
  {
    const std::lock_guard<std::mutex> held(lock);
    listening = false;
    for (const Span& span : heard)
      for (auto* event : {span.first, span.last}) give_back_locked(event);
    for (const Timing& timing : waiting)
      for (auto* event : timing.events) give_back_locked(event);
    heard.clear();
    waiting.clear();
    made.clear();
    left.swap(spare);
  }
  for (auto& [index, events] : left)
    for (auto* event : events) delete event;
}

__attribute__((visibility("default"))) uint64_t op_tools_clock_sequence() { return at::sequence_number::peek(); }

// An event that is recorded now, or null.
__attribute__((visibility("default"))) c10::Event* op_tools_clock_mark() { return mark(); }

__attribute__((visibility("default"))) void op_tools_clock_release(c10::Event* first, c10::Event* last) {
  give_back(first);
  give_back(last);
}

// The nodes of a call have the numbers from `since` up to `until` of this thread.
__attribute__((visibility("default"))) void op_tools_clock_note(
    int64_t since, int64_t until, int64_t id, int64_t site, int64_t step, int64_t way) {
  const std::lock_guard<std::mutex> held(lock);
  if (listening && until > since) note_locked(at::RecordFunction::currentThreadId(), since, until, {id, site, step, way});
}

// A call has run, between two events; it ran no kernel where these are null. Returns how many times wait to be read.
__attribute__((visibility("default"))) int64_t op_tools_clock_ran(
    c10::Event* first, c10::Event* last, int64_t id, int64_t site, int64_t step, int64_t began, int64_t since, int64_t which) {
  const auto until = int64_t(at::sequence_number::peek());
  const Call call{id, site, step, kEvents};
  const int64_t runner = runner_now();
  const std::lock_guard<std::mutex> held(lock);
  if (!listening || which != listenings) {
    give_back_locked(first);
    give_back_locked(last);
    return 0;
  }
  if (until > since) note_locked(at::RecordFunction::currentThreadId(), since, until, call);
  waiting.push_back({call, 0, runner, began, 0.0, {}});
  if (first != nullptr) waiting.back().events = {first, last};
  return int64_t(waiting.size());
}

// Put together what was heard of backward passes, when none is under way. Returns how many times wait to be read.
__attribute__((visibility("default"))) int64_t op_tools_clock_passes(int graph_is_kept) {
  const std::lock_guard<std::mutex> held(lock);
  std::vector<Backward> found;
  std::unordered_map<int64_t, size_t> by_id;
  std::unordered_set<uint64_t> threads;
  for (const Span& span : heard) {
    const Call* call = call_at_locked(span.thread, span.sequence);
    if (call == nullptr) {
      give_back_locked(span.first);
      give_back_locked(span.last);
      continue;
    }
    threads.insert(span.thread);
    const auto [at, is_new] = by_id.emplace(call->id, found.size());
    if (is_new) found.push_back({{*call, 1, span.runner, span.began, 0.0, {}}});
    Backward& one = found[at->second];
    one.timing.began = std::min(one.timing.began, span.began);
    if (span.light) {
      one.light_ns += span.ended - span.began;
      continue;
    }
    if (!one.heavy) one.timing.thread = span.runner;
    one.heavy = true;
    one.host_ns += span.ended - span.began;
    one.whole = one.whole && span.first != nullptr && span.last != nullptr;
    for (auto* event : {span.first, span.last})
      if (event != nullptr) one.timing.events.push_back(event);
  }
  heard.clear();
  for (Backward& one : found) end_locked(one);
  if (!graph_is_kept) {
    for (const uint64_t thread : threads) {
      auto& calls = made[thread];
      const auto gone = [&](const Made& one) { return by_id.count(one.call.id) > 0; };
      calls.erase(std::remove_if(calls.begin(), calls.end(), gone), calls.end());
      if (calls.empty()) made.erase(thread);
    }
  }
  return int64_t(waiting.size());
}

// Read times, oldest first, at most so many: those that the device has passed, or all if they may be waited for. Their
// events may be used again. `taken` becomes their number; returns how many of them have a time.
// Where the device has passed the last event, it has passed all that are of the same stream: the others are not asked.
__attribute__((visibility("default"))) int64_t op_tools_clock_read(Row* out, int64_t most, int wait, int64_t* taken) {
  std::vector<Timing> some;
  {
    const std::lock_guard<std::mutex> held(lock);
    const auto end = waiting.begin() + std::min<int64_t>(most, int64_t(waiting.size()));
    some.assign(std::make_move_iterator(waiting.begin()), std::make_move_iterator(end));
    waiting.erase(waiting.begin(), end);
  }
  bool all_passed = false;
  for (size_t i = some.size(); i-- > 0 && !all_passed;) {
    if (some[i].events.empty()) continue;
    try {
      all_passed = passed(some[i], wait != 0);
    } catch (...) {
    }
    break;
  }
  size_t done = 0;
  int64_t count = 0;
  for (; done < some.size(); ++done) {
    Timing& timing = some[done];
    double elapsed = -1;
    bool is_read = false;
    if (all_passed) {
      try {
        elapsed = measured(timing);
        is_read = true;
      } catch (...) {  // another stream is not that far
      }
    }
    if (!is_read) {
      try {
        if (!passed(timing, wait != 0)) break;
        elapsed = measured(timing);
      } catch (...) {
        elapsed = -1;
      }
    }
    const Call& call = timing.call;
    if (elapsed >= 0) out[count++] = {call.id, call.site, call.step, timing.backward, timing.thread, timing.began, elapsed};
  }
  const std::lock_guard<std::mutex> held(lock);
  for (size_t i = 0; i < done; ++i)
    for (auto* event : some[i].events) give_back_locked(event);
  for (size_t i = some.size(); i-- > done;) {
    if (listening) {
      waiting.push_front(std::move(some[i]));
      continue;
    }
    for (auto* event : some[i].events) give_back_locked(event);
  }
  *taken = int64_t(done);
  return count;
}

// Times that wait to be read, calls whose nodes are known, and events that nobody uses.
__attribute__((visibility("default"))) void op_tools_clock_count(int64_t* out) {
  const std::lock_guard<std::mutex> held(lock);
  out[0] = int64_t(waiting.size());
  out[1] = out[2] = 0;
  for (const auto& [thread, calls] : made) out[1] += int64_t(calls.size());
  for (const auto& [index, events] : spare) out[2] += int64_t(events.size());
}

}  // extern "C"
