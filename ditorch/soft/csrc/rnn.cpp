// Fused recurrent cells, which PyTorch asks of every device and the CPU does not have.
//
// They are given to the CPU, so that they run on soft as every other kernel does. Gates are added in the order in
// which the CPU's unfused cells add them.
#include "soft.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <tuple>

namespace soft {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

bool given(const MaybeTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

Tensor joined(std::vector<Tensor> parts) {
  return at::cat(parts, 1);
}

// Products with the weights, one column per gate and unit, with or without a bias.
Tensor gates(const Tensor& product, const MaybeTensor& bias) {
  return given(bias) ? product.add(*bias) : product;
}

Tensor one_minus(const Tensor& x) {
  return x.neg().add_(1);
}

// Gradients of x, given those of sigmoid(x) and tanh(x).
Tensor through_sigmoid(const Tensor& grad, const Tensor& result) {
  return grad.mul(one_minus(result)).mul_(result);
}
Tensor through_tanh(const Tensor& grad, const Tensor& result) {
  return grad.mul(one_minus(result.mul(result)));
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& cx,
                                             const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto all = gates(from_hidden, hidden_bias).add(gates(from_input, input_bias)).chunk(4, 1);
  const auto in = all[0].sigmoid(), forget = all[1].sigmoid(), cell = all[2].tanh(), out = all[3].sigmoid();
  auto cy = forget.mul(cx).add_(in.mul(cell));
  auto hy = out.mul(cy.tanh());
  return {std::move(hy), std::move(cy), joined({in, forget, cell, out})};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& grad_hy, const MaybeTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  if (!given(grad_hy) && !given(grad_cy)) {
    return {};
  }
  const auto all = workspace.chunk(4, 1);
  const auto &in = all[0], &forget = all[1], &cell = all[2], &out = all[3];
  const auto tanh_cy = cy.tanh();
  const auto grad_out = given(grad_hy) ? grad_hy->mul(tanh_cy) : at::zeros_like(cy);
  auto grad_state = given(grad_hy) ? through_tanh(grad_hy->mul(out), tanh_cy) : at::zeros_like(cy);
  if (given(grad_cy)) {
    grad_state.add_(*grad_cy);
  }
  auto grad_gates = joined({through_sigmoid(grad_state.mul(cell), in), through_sigmoid(grad_state.mul(cx), forget),
                            through_tanh(grad_state.mul(in), cell), through_sigmoid(grad_out, out)});
  auto grad_bias = has_bias ? grad_gates.sum(0) : Tensor();
  return {std::move(grad_gates), grad_state.mul(forget), std::move(grad_bias)};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& hx,
                                    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto input = gates(from_input, input_bias).chunk(3, 1);
  const auto hidden = gates(from_hidden, hidden_bias).chunk(3, 1);
  const auto reset = hidden[0].add(input[0]).sigmoid_(), update = hidden[1].add(input[1]).sigmoid_();
  const auto fresh = input[2].add(hidden[2].mul(reset)).tanh_();
  return {hx.sub(fresh).mul_(update).add_(fresh), joined({reset, update, fresh, hx, hidden[2]})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  const auto all = workspace.chunk(5, 1);
  const auto &reset = all[0], &update = all[1], &fresh = all[2], &hx = all[3], &hidden_fresh = all[4];
  const auto grad_update = through_sigmoid(grad_hy.mul(hx.sub(fresh)), update);
  const auto grad_fresh = through_tanh(grad_hy.mul(one_minus(update)), fresh);
  const auto grad_reset = through_sigmoid(grad_fresh.mul(hidden_fresh), reset);
  auto grad_input = joined({grad_reset, grad_update, grad_fresh});
  auto grad_hidden = joined({grad_reset, grad_update, grad_fresh.mul(reset)});
  auto input_bias = has_bias ? grad_input.sum(0) : Tensor();
  auto hidden_bias = has_bias ? grad_hidden.sum(0) : Tensor();
  return {std::move(grad_input), std::move(grad_hidden), grad_hy.mul(update), std::move(input_bias),
          std::move(hidden_bias)};
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

} // namespace
} // namespace soft
