// Sparse tensors: made of dense ones, so an alias of one is put together from aliases of its parts.
#include "soft.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/SparseTensorUtils.h>

namespace soft {
namespace {

bool is_compressed(c10::Layout layout) {
  return layout == c10::kSparseCsr || layout == c10::kSparseCsc || layout == c10::kSparseBsr || layout == c10::kSparseBsc;
}

void fill_coo(const at::Tensor& from, const at::Tensor& to, const PartAlias& part) {
  const auto* source = at::sparse::get_sparse_impl(from);
  auto* target = at::sparse::get_sparse_impl(to);
  target->raw_resize_(source->sparse_dim(), source->dense_dim(), source->sizes());
  target->set_indices_and_values_unsafe(part(source->indices()), part(source->values()));
  target->set_coalesced(source->coalesced());
}

void fill_compressed(const at::Tensor& from, const at::Tensor& to, const PartAlias& part) {
  const auto* source = at::sparse_csr::get_sparse_csr_impl(from);
  at::sparse_csr::get_sparse_csr_impl(to)->set_member_tensors(
      part(source->compressed_indices()), part(source->plain_indices()), part(source->values()), source->sizes());
}

} // namespace

bool is_sparse(const at::Tensor& tensor) {
  return tensor.layout() == c10::kSparse || is_compressed(tensor.layout());
}

at::Tensor sparse_alias(const at::Tensor& from, c10::Device device, const PartAlias& part) {
  using c10::DispatchKey;
  using c10::DispatchKeySet;
  const bool soft = device.type() == kSoft;
  at::Tensor made;
  if (is_compressed(from.layout())) {
    const DispatchKeySet keys(soft ? DispatchKey::SparseCsrPrivateUse1 : DispatchKey::SparseCsrCPU);
    made = at::detail::make_tensor<at::SparseCsrTensorImpl>(keys, device, from.layout(), from.dtype());
  } else {
    const DispatchKeySet keys(soft ? DispatchKey::SparsePrivateUse1 : DispatchKey::SparseCPU);
    made = at::detail::make_tensor<at::SparseTensorImpl>(keys, from.dtype());
  }
  fill_sparse(from, made, part);
  return made;
}

void fill_sparse(const at::Tensor& from, const at::Tensor& to, const PartAlias& part) {
  TORCH_CHECK(from.layout() == to.layout(), "soft: a sparse tensor changed its layout from ", to.layout(), " to ",
              from.layout());
  is_compressed(from.layout()) ? fill_compressed(from, to, part) : fill_coo(from, to, part);
}

} // namespace soft
