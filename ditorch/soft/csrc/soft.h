// Shared declarations of the software accelerator.
//
// A soft tensor lives in host memory but carries the PrivateUse1 key, so to
// PyTorch it is a device tensor. Kernels are the CPU's: a call is made on
// aliases (CPU tensors over the same memory), and results are wrapped back
// without a copy.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#define SOFT_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace soft {

constexpr c10::DeviceType kSoft = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kMaxDevices = 64;

// --- runtime.cpp: devices, streams, events ---------------------------------
c10::DeviceIndex device_count() noexcept;
void set_device_count(int64_t count);
c10::DeviceIndex current_device() noexcept;
void set_device(c10::DeviceIndex index);
c10::DeviceIndex exchange_device(c10::DeviceIndex index);
// Turns -1 into the current device; throws for an index that does not exist.
c10::DeviceIndex checked_index(c10::DeviceIndex index);
c10::Device checked_device(std::optional<c10::Device> device);
int64_t now_ns() noexcept;

// --- memory.cpp: allocator and statistics ----------------------------------
struct MemoryStats {
  int64_t allocated, peak, total_allocated, total_freed;
  int64_t blocks, peak_blocks, total_blocks, freed_blocks;
  int64_t ooms, limit;
};
c10::Allocator* allocator();
// Turns the host's "can't allocate memory" into torch.OutOfMemoryError; returns for any other error.
void rethrow_if_out_of_memory(const c10::Error& error);
// A soft DataPtr that keeps `host` alive and accounts for its bytes.
c10::DataPtr adopt(c10::Storage host, c10::DeviceIndex device);
// The CPU storage that a soft storage lies over, if it was adopted: what other processes can be handed.
std::optional<c10::Storage> adopted(const c10::Storage& soft);
MemoryStats memory_stats(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void reset_accumulated(c10::DeviceIndex device);
void set_memory_limit(c10::DeviceIndex device, int64_t bytes);
std::pair<int64_t, int64_t> memory_info(c10::DeviceIndex device); // free, total
c10::Allocator* pinned_allocator();
bool is_pinned(const void* ptr);

// --- generator.cpp ----------------------------------------------------------
const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);
// From now on the default generators draw from the CPU's.
void share_random();
// The state of a generator that has drawn so many more 32-bit numbers.
at::Tensor advanced_state(const at::Tensor& state, int64_t numbers);
// The CPU generator that a soft generator draws from.
at::Generator host_generator(const at::Generator& generator);

// --- kernels.cpp ------------------------------------------------------------
// Answers whether a tensor is a DTensor; module.cpp asks Python.
void set_is_distributed(bool (*question)(const at::Tensor&));

// --- sparse.cpp: sparse tensors, put together from dense ones ------------------
// What becomes of one of the dense tensors inside.
using PartAlias = std::function<at::Tensor(const at::Tensor&)>;
// Whether a tensor has one of the sparse layouts: COO, CSR, CSC, BSR, BSC.
bool is_sparse(const at::Tensor& tensor);
// A sparse tensor on `device` like `from`, with the given parts.
at::Tensor sparse_alias(const at::Tensor& from, c10::Device device, const PartAlias& part);
// Give a sparse tensor the sizes and parts of another.
void fill_sparse(const at::Tensor& from, const at::Tensor& to, const PartAlias& part);

// --- fallback.cpp: running an operator on aliases ----------------------------
// A CPU tensor over the memory of `tensor`: same sizes, strides, offset and bits.
at::Tensor host_alias(const at::Tensor& tensor);
// Names of the operators that run through the boxed kernel, as in "aten::add.Tensor".
const std::unordered_set<std::string>& planned_operators();

// --- faults: a Python callback around chosen operators ------------------------
struct FaultHook {
  virtual ~FaultHook() = default;
  // `stack` holds the arguments as CPU aliases; a non-null token asks for after().
  virtual void* before(const c10::OperatorHandle& op, c10::DeviceIndex device, const torch::jit::Stack& stack) = 0;
  virtual void after(void* token, const torch::jit::Stack& outputs) = 0;
};
void set_fault_hook(FaultHook* hook, std::unordered_set<std::string> operators);
// The hook if this operator is one of the chosen, else nullptr.
FaultHook* fault_hook_for(const std::string& name);

} // namespace soft
