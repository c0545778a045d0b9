// Collectives for soft tensors: gloo on CPU aliases, without a copy.
#include "soft.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

namespace soft {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors hosts(const Tensors& tensors) {
  Tensors result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    result.push_back(host_alias(tensor));
  }
  return result;
}

std::vector<Tensors> hosts(const std::vector<Tensors>& lists) {
  std::vector<Tensors> result;
  result.reserve(lists.size());
  for (const auto& list : lists) {
    result.push_back(hosts(list));
  }
  return result;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors result;
  for (const auto& list : lists) {
    result.insert(result.end(), list.begin(), list.end());
  }
  return result;
}

// A fault planted on a collective: asked before it starts, told when its results are there.
class Struck {
 public:
  Struck(const char* name, Tensors results, const Tensors& sent = {}) : results_(std::move(results)) {
    hook_ = fault_hook_for(name);
    if (C10_LIKELY(hook_ == nullptr) || results_.empty()) {
      return;
    }
    const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
    if (op.has_value()) {
      token_ = hook_->before(*op, current_device(), torch::jit::Stack{c10::IValue(results_), c10::IValue(sent)});
    }
  }
  // What has to run after the collective: what moves its results, then the fault.
  std::function<void()> after(std::function<void()> finish = {}) const {
    if (token_ == nullptr) {
      return finish;
    }
    return [hook = hook_, token = token_, results = results_, finish = std::move(finish)] {
      if (finish) {
        finish();
      }
      hook->after(token, torch::jit::Stack{c10::IValue(results)});
    };
  }

 private:
  FaultHook* hook_ = nullptr;
  void* token_ = nullptr;
  Tensors results_;
};

// Work on aliases whose results are the soft tensors.
class SoftWork final : public c10d::Work {
 public:
  // `finish` runs once, after the collective, to move results that did not land in place.
  SoftWork(WorkPtr inner, Tensors outputs, std::function<void()> finish = {})
      : inner_(std::move(inner)), outputs_(std::move(outputs)), finish_(std::move(finish)) {}

  bool isCompleted() override {
    return inner_->isCompleted();
  }
  bool isSuccess() const override {
    return inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  Tensors result() override {
    return outputs_;
  }
  void synchronize() override {
    inner_->synchronize();
    complete();
  }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    const bool done = inner_->wait(timeout);
    complete();
    return done;
  }
  void abort() override {
    inner_->abort();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    for (const auto& tensor : outputs_) {
      if (tensor.device().type() == kSoft &&
          std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) {
        devices.push_back(tensor.device());
      }
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
    auto self = c10::intrusive_ptr<SoftWork>::unsafe_reclaim_from_nonowning(this);
    inner_->getFuture()->addCallback([future, self](c10::ivalue::Future& inner) {
      if (inner.hasError()) {
        future->setError(inner.exception_ptr());
      } else {
        self->complete();
        future->markCompleted(c10::IValue(self->outputs_));
      }
    });
    return future;
  }

 private:
  void complete() {
    if (finish_) {
      std::call_once(finished_, finish_);
    }
  }

  WorkPtr inner_;
  Tensors outputs_;
  std::function<void()> finish_;
  std::once_flag finished_;
};

class SoftBackend final : public c10d::Backend {
 public:
  explicit SoftBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : c10d::Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override {
    return "softccl";
  }
  void setTimeout(std::chrono::milliseconds timeout)
#if SOFT_TORCH_AT_LEAST(2, 8)
      override
#endif
  {
#if SOFT_TORCH_AT_LEAST(2, 8)
    inner_->setTimeout(timeout);
#endif
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options = {}) override {
    auto host = hosts(tensors);
    const Struck struck("c10d::broadcast_", host);
    return wrap(inner_->broadcast(host, options), tensors, struck);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options = {}) override {
    auto host = hosts(tensors);
    const Struck struck("c10d::allreduce_", host);
    return wrap(inner_->allreduce(host, options), tensors, struck);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options = {}) override {
    auto host = hosts(tensors);
    const Struck struck("c10d::allreduce_coalesced_", host);
    return wrap(inner_->allreduce_coalesced(host, options), tensors, struck);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options = {}) override {
    auto host = hosts(tensors);
    const Struck struck("c10d::reduce_", host);
    return wrap(inner_->reduce(host, options), tensors, struck);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options = {}) override {
    auto host_outputs = hosts(outputs);
    auto host_inputs = hosts(inputs);
    const Struck struck("c10d::allgather_", flat(host_outputs), host_inputs);
    return wrap(inner_->allgather(host_outputs, host_inputs, options), flat(outputs), struck);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options = {}) override {
    // Flat, since gloo would have the output's first dimension grow, and no other shape.
    auto host_output = host_alias(output).view({-1});
    auto host_input = host_alias(input).view({-1});
    const Struck struck("c10d::_allgather_base_", {host_output}, {host_input});
    return wrap(inner_->_allgather_base(host_output, host_input, options), {output}, struck);
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options = {}) override {
    auto host_outputs = hosts(outputs);
    auto host_inputs = hosts(inputs);
    const Struck struck("c10d::allgather_coalesced_", flat(host_outputs), host_inputs);
    return wrap(inner_->allgather_coalesced(host_outputs, host_inputs, options), flat(outputs), struck);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options = {}) override {
    auto host_outputs = hosts(outputs);
    auto host_inputs = hosts(inputs);
    const Struck struck("c10d::allgather_into_tensor_coalesced_", host_outputs, host_inputs);
    return wrap(inner_->allgather_into_tensor_coalesced(host_outputs, host_inputs, options), outputs, struck);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options = {}) override {
    auto host_outputs = hosts(outputs);
    auto host_inputs = hosts(inputs);
    const Struck struck("c10d::gather_", flat(host_outputs), host_inputs);
    return wrap(inner_->gather(host_outputs, host_inputs, options), flat(outputs), struck);
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options = {}) override {
    auto host_outputs = hosts(outputs);
    auto host_inputs = hosts(inputs);
    const Struck struck("c10d::scatter_", host_outputs, flat(host_inputs));
    return wrap(inner_->scatter(host_outputs, host_inputs, options), outputs, struck);
  }

  // gloo has no reduce_scatter of lists: reduce everything, keep the own part.
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options = {}) override {
    TORCH_CHECK_VALUE(outputs.size() == 1 && inputs.size() == 1 && static_cast<int>(inputs[0].size()) == getSize(),
                      "softccl: reduce_scatter needs one output and ", getSize(), " inputs per rank");
    Tensors parts;
    for (const auto& input : hosts(inputs[0])) {
      parts.push_back(input.reshape({-1}));
    }
    int64_t start = 0;
    for (int rank = 0; rank < getRank(); ++rank) {
      start += parts[rank].numel();
    }
    return reduce_and_keep("c10d::reduce_scatter_", at::cat(parts), start, outputs[0], options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options = {}) override {
    TORCH_CHECK_VALUE(input.numel() == output.numel() * getSize(), "softccl: reduce_scatter_tensor needs an input of ",
                      getSize(), " times the output's ", output.numel(), " elements, got ", input.numel());
    return reduce_and_keep("c10d::_reduce_scatter_base_", host_alias(input).reshape({-1}).clone(),
                           output.numel() * getRank(), output, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options = {}) override {
    TORCH_CHECK_VALUE(!outputs.empty() && outputs.size() == inputs.size(),
                      "softccl: reduce_scatter_tensor_coalesced needs as many outputs as inputs");
    for (size_t i = 0; i + 1 < outputs.size(); ++i) {
      _reduce_scatter_base(outputs[i], inputs[i], options)->wait();
    }
    return wrap(_reduce_scatter_base(outputs.back(), inputs.back(), options), outputs);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options = {}) override {
    auto host_output = host_alias(output);
    auto host_input = host_alias(input);
    const Struck struck("c10d::alltoall_base_", {host_output}, {host_input});
    return wrap(inner_->alltoall_base(host_output, host_input, output_splits, input_splits, options), {output}, struck);
  }
  // gloo has no all_to_all of lists: one flat buffer each way, with splits.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options = {}) override {
    const auto size = static_cast<size_t>(getSize());
    TORCH_CHECK_VALUE(outputs.size() == size && inputs.size() == size, "softccl: all_to_all needs ", size,
                      " outputs and inputs");
    Tensors parts;
    std::vector<int64_t> sent, received;
    for (const auto& input : hosts(inputs)) {
      parts.push_back(input.reshape({-1}));
      sent.push_back(input.numel());
    }
    int64_t total = 0;
    for (const auto& output : outputs) {
      received.push_back(output.numel());
      total += output.numel();
    }
    auto input = at::cat(parts);
    auto output = at::empty({total}, input.options());
    const Struck struck("c10d::alltoall_", hosts(outputs), parts);
    auto work = inner_->alltoall_base(output, input, received, sent, options);
    auto finish = [output, outputs] {
      int64_t start = 0;
      for (const auto& target : outputs) {
        auto host = host_alias(target);
        host.copy_(output.narrow(0, start, target.numel()).view(target.sizes()));
        start += target.numel();
      }
    };
    return c10::make_intrusive<SoftWork>(std::move(work), outputs, struck.after(std::move(finish)));
  }

  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    auto host = hosts(tensors);
    return wrap(inner_->send(host, rank, tag), tensors);
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    auto host = hosts(tensors);
    const Struck struck("c10d::recv_", host);
    return wrap(inner_->recv(host, rank, tag), tensors, struck);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto host = hosts(tensors);
    const Struck struck("c10d::recv_any_source_", host);
    return wrap(inner_->recvAnysource(host, tag), tensors, struck);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options = {}) override {
    return inner_->barrier(options);
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks = false) override {
    inner_->monitoredBarrier(options, wait_all_ranks);
  }
  void setSequenceNumberForGroup() override {
    inner_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return inner_->getSequenceNumberForGroup();
  }

 private:
  static WorkPtr wrap(WorkPtr work, Tensors outputs) {
    return c10::make_intrusive<SoftWork>(std::move(work), std::move(outputs));
  }
  static WorkPtr wrap(WorkPtr work, Tensors outputs, const Struck& struck) {
    return c10::make_intrusive<SoftWork>(std::move(work), std::move(outputs), struck.after());
  }
  WorkPtr reduce_and_keep(const char* name, at::Tensor all, int64_t start, const at::Tensor& output,
                          const c10d::ReduceScatterOptions& options) {
    c10d::AllreduceOptions reduce;
    reduce.reduceOp = options.reduceOp;
    reduce.timeout = options.timeout;
    Tensors tensors{all};
    const Struck struck(name, {host_alias(output)}, tensors);
    auto work = inner_->allreduce(tensors, reduce);
    auto finish = [all, start, output] {
      host_alias(output).copy_(all.narrow(0, start, output.numel()).view(output.sizes()));
    };
    return c10::make_intrusive<SoftWork>(std::move(work), Tensors{output}, struck.after(std::move(finish)));
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
};

// What DistributedDataParallel measures its iterations with; work on soft is complete when a call returns.
class SoftTimer final : public c10d::Timer {
 public:
  explicit SoftTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimeRef(start), to = getTimeRef(end);
    if (from == c10d::kUnsetTime || to == c10d::kUnsetTime || to < from) {
      return std::nullopt;
    }
    return to - from;
  }
};

} // namespace
} // namespace soft

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kPrivateUse1, soft::SoftTimer)
} // namespace c10d

namespace soft {

void bind_collectives(pybind11::module_& m) {
  m.def("make_collectives", [](const c10::intrusive_ptr<c10d::Backend>& inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<SoftBackend>(inner);
  });
}

} // namespace soft
