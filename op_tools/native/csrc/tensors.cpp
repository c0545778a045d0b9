// Reads a tensor without Python: what `front_words.h` needs to know of it. Only c10's headers, which take seconds.

#include <c10/core/TensorImpl.h>

#include <cstdint>

namespace {

bool is_usual(const c10::TensorImpl &tensor) {
  using c10::DispatchKey;
  return tensor.layout() == c10::kStrided && !tensor.has_symbolic_sizes_strides() && !tensor.is_python_dispatch() &&
         !tensor.key_set().has_any(c10::DispatchKeySet(
             {DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper, DispatchKey::Functionalize,
              DispatchKey::Batched, DispatchKey::NestedTensor, DispatchKey::ZeroTensor}));
}

}  // namespace

// Words that are equal for tensors that look alike: dtype, device, requires_grad, sizes and strides; how many they are,
// -1 for an unusual tensor. Its address, and its type of device, of which 0 is the CPU and -1 is none.
extern "C" __attribute__((visibility("default"))) int32_t op_tools_read_tensor(
    const void *tensor, int64_t *words, int32_t room, uint64_t *address, int32_t *device_type) {
  try {
    const auto &read = *static_cast<const c10::TensorImpl *>(tensor);
    if (!is_usual(read)) return -1;
    const auto sizes = read.sizes(), strides = read.strides();
    const auto count = static_cast<int32_t>(sizes.size());
    if (2 * count + 1 > room) return -1;
    const c10::Device device = read.device();
    *words++ = int64_t(count) | int64_t(c10::typeMetaToScalarType(read.dtype())) << 16 |
               int64_t(uint8_t(device.type())) << 24 | int64_t(uint8_t(device.index())) << 32 |
               int64_t(read.requires_grad()) << 40 | int64_t(read.is_conj()) << 41 | int64_t(read.is_neg()) << 42;
    for (const auto size : sizes) *words++ = size;
    for (const auto stride : strides) *words++ = stride;
    *address = read.has_storage() ? reinterpret_cast<uint64_t>(read.data()) : 0;
    *device_type = device.is_meta() ? -1 : int32_t(device.type());
    return 2 * count + 1;
  } catch (...) {  // some tensors have no such thing
    return -1;
  }
}
