// Times of autograd nodes: a device event before and after each node, recorded in C++ by the thread that runs it.
// Python learns afterwards which node ran when, and asks for its time once the device has passed the second event.

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>
#include <string>
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

std::mutex lock;
std::vector<Span> heard;
std::map<c10::DeviceIndex, std::vector<c10::Event*>> spare;
at::CallbackHandle handle = 0;
bool listening = false;
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

void give_back(c10::Event* event) {
  if (event == nullptr) return;
  const std::lock_guard<std::mutex> held(lock);
  spare[event->device_index()].push_back(event);
}

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& function) {
  if (function.seqNr() < 0) return nullptr;  // no call made it: it puts a gradient into `.grad`
  auto running = std::make_unique<Running>();
  running->span.thread = function.forwardThreadId();
  running->span.sequence = function.seqNr();
  thread_local const int64_t runner = syscall(SYS_gettid);
  running->span.runner = runner;
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

// Returns 0 where somebody else listens already, or the device is not known. `light` are names of nodes, by lines.
__attribute__((visibility("default"))) int op_tools_clock_start(const char* device_type, const char* light) {
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
    wanted_device = device;
    if (light_nodes.empty()) {  // once: nodes of an earlier run may still look
      std::istringstream names(light);
      for (std::string name; std::getline(names, name);) light_nodes.insert(name);
    }
    heard.clear();
  }
  try {
    handle = at::addGlobalCallback(
        at::RecordFunctionCallback(before, after).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  } catch (...) {
    const std::lock_guard<std::mutex> held(lock);
    listening = false;
    return 0;
  }
  return 1;
}

__attribute__((visibility("default"))) void op_tools_clock_stop() {
  at::removeCallback(handle);
  std::map<c10::DeviceIndex, std::vector<c10::Event*>> left;
  {
    const std::lock_guard<std::mutex> held(lock);
    listening = false;
    heard.clear();
    left.swap(spare);
  }
  for (auto& [index, events] : left)
    for (auto* event : events) delete event;
}

__attribute__((visibility("default"))) uint64_t op_tools_clock_thread() { return at::RecordFunction::currentThreadId(); }

__attribute__((visibility("default"))) uint64_t op_tools_clock_sequence() { return at::sequence_number::peek(); }

// Hands over up to `most` spans, oldest first, and returns how many.
__attribute__((visibility("default"))) int64_t op_tools_clock_take(Span* out, int64_t most) {
  const std::lock_guard<std::mutex> held(lock);
  const int64_t count = std::min<int64_t>(most, static_cast<int64_t>(heard.size()));
  std::copy(heard.begin(), heard.begin() + count, out);
  heard.erase(heard.begin(), heard.begin() + count);
  return count;
}

// An event that is recorded now, or null.
__attribute__((visibility("default"))) c10::Event* op_tools_clock_mark() { return mark(); }

// Milliseconds of some timings: each is the sum over pairs of events, -1 where it cannot be known. Returns how many could be
// read, from the first on: all if they may be waited for. Events of those may be used again.
// Where the device has passed the last event, it has passed all that are of the same stream: the others are not asked.
__attribute__((visibility("default"))) int64_t op_tools_clock_read(
    c10::Event** events, const int64_t* pairs, int64_t count, int wait, double* found) {
  const int64_t all = std::accumulate(pairs, pairs + count, int64_t{0});
  bool all_passed = false;
  try {
    if (all > 0 && wait) events[2 * all - 1]->synchronize();
    all_passed = all > 0 && (wait || events[2 * all - 1]->query());
  } catch (...) {
  }
  for (int64_t i = 0; i < count; events += 2 * pairs[i], ++i) {
    double total = 0;
    const auto measure = [&] {
      total = 0;
      for (int64_t k = 0; k < pairs[i]; ++k) total += events[2 * k]->elapsedTime(*events[2 * k + 1]);
    };
    const auto ask = [&] {  // whether the device has passed the events of this one
      for (int64_t k = 0; k < pairs[i]; ++k) {
        if (wait)
          events[2 * k + 1]->synchronize();
        else if (!events[2 * k + 1]->query())
          return false;
      }
      return true;
    };
    bool measured = false;
    if (all_passed) {
      try {
        measure();
        measured = true;
      } catch (...) {  // another stream is not that far
      }
    }
    if (!measured) {
      try {
        if (!ask()) return i;
        measure();
      } catch (...) {
        total = -1;
      }
    }
    found[i] = total;
    for (int64_t k = 0; k < 2 * pairs[i]; ++k) give_back(events[k]);
  }
  return count;
}

__attribute__((visibility("default"))) void op_tools_clock_release(c10::Event* first, c10::Event* last) {
  give_back(first);
  give_back(last);
}

}  // extern "C"
