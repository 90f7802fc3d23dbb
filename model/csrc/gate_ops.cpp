// The gate operators as torch sees them: schemas, checks, outputs, and the choice of the device's kernels.
//
// Autograd and the shapes for torch.compile are registered in model/ops/fused.py.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "gate_kernels.h"
#include "gate_math.h"

#ifdef GRT_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#define GRT_DISPATCH(TENSOR, NAME, ...) AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, (TENSOR).scalar_type(), NAME, __VA_ARGS__)

namespace grt {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Contiguous rows of at least one channel.
Tensor state(const Tensor& hidden) {
  TORCH_CHECK(hidden.dim() >= 1 && hidden.size(-1) >= 1, "grt: the state has shape ", hidden.sizes(), ", and no channels");
  return hidden.contiguous();
}

// Contiguous, of the device and dtype of `like`; `rows` x `channels` numbers are the caller's to check.
Tensor operand(const Tensor& x, const Tensor& like, const char* name) {
  TORCH_CHECK(x.device() == like.device(), "grt: ", name, " is on ", x.device(), ", the state on ", like.device());
  TORCH_CHECK(x.scalar_type() == like.scalar_type(), "grt: ", name, " is ", x.scalar_type(), ", the state ", like.scalar_type());
  return x.contiguous();
}

Tensor same_shape(const Tensor& x, const Tensor& like, const char* name) {
  TORCH_CHECK(x.sizes() == like.sizes(), "grt: ", name, " has shape ", x.sizes(), ", the state ", like.sizes());
  return operand(x, like, name);
}

Tensor per_channel(const Tensor& x, const Tensor& like, const char* name) {
  TORCH_CHECK(x.dim() == 1 && x.size(0) == like.size(-1), "grt: ", name, " has shape ", x.sizes(), ", the state ", like.sizes());
  return operand(x, like, name);
}

at::ScalarType wide(const Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// One number for each row.
Tensor per_row(const Tensor& x, const Tensor& hidden, const char* name) {
  const auto rows = hidden.sizes().slice(0, hidden.dim() - 1);
  TORCH_CHECK(x.device() == hidden.device(), "grt: ", name, " is on ", x.device(), ", the state on ", hidden.device());
  TORCH_CHECK(x.scalar_type() == wide(hidden) && x.sizes() == rows, "grt: ", name, " is ", x.scalar_type(), " ", x.sizes(), ", not ",
              wide(hidden), " ", rows, ", one number for each token");
  return x.contiguous();
}

int64_t row_count(const Tensor& hidden) { return hidden.numel() / hidden.size(-1); }

// The positions and counters of one draw, checked and held for as long as the kernel is being launched.
struct NoiseTensors {
  Tensor positions, counters;

  NoiseTensors(const OptionalTensor& positions_, const OptionalTensor& counters_, const Tensor& hidden) {
    if (!positions_) return;
    TORCH_CHECK(counters_, "grt: noise needs counters (seed and recurrence) beside the positions");
    TORCH_CHECK(positions_->scalar_type() == at::kLong && counters_->scalar_type() == at::kLong, "grt: positions and counters are int64");
    TORCH_CHECK(positions_->numel() == row_count(hidden), "grt: ", positions_->numel(), " positions for ", row_count(hidden), " tokens");
    TORCH_CHECK(counters_->numel() == 2, "grt: counters are (seed, recurrence), not ", counters_->numel(), " numbers");
    TORCH_CHECK(positions_->device() == hidden.device() && counters_->device() == hidden.device(), "grt: noise lies on another device");
    positions = positions_->contiguous();
    counters = counters_->contiguous();
  }

  template <typename T>
  Noise<T> of(double sigma) const {
    if (!positions.defined()) return {nullptr, nullptr, 0};
    return {positions.const_data_ptr<int64_t>(), counters.const_data_ptr<int64_t>(), Real<T>(sigma)};
  }
};

int64_t partial_rows(const Tensor& hidden) {
#ifdef GRT_CUDA
  if (hidden.is_cuda()) return cuda::partial_rows(row_count(hidden));
#endif
  return cpu::partial_rows(row_count(hidden));
}

template <typename Arguments>
void launch(const Arguments& arguments, [[maybe_unused]] const Tensor& hidden) {
#ifdef GRT_CUDA
  if (hidden.is_cuda()) {
    const c10::cuda::CUDAGuard guard(hidden.device());
    return cuda::launch(arguments, c10::cuda::getCurrentCUDAStream().stream());
  }
#endif
  cpu::launch(arguments);
}

template <typename T>
const T* pointer_or_null(const Tensor& x) {
  return x.defined() ? x.const_data_ptr<T>() : nullptr;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gate_head(const Tensor& hidden_, const Tensor& weight_,
                                                                     const OptionalTensor& positions, const OptionalTensor& counters,
                                                                     double sigma, double eps, bool rms) {
  const Tensor hidden = state(hidden_), weight = per_channel(weight_, hidden, "weight");
  const NoiseTensors noise(positions, counters, hidden);
  const auto row_sizes = hidden.sizes().slice(0, hidden.dim() - 1);
  const auto row_options = hidden.options().dtype(wide(hidden));
  Tensor normed = at::empty_like(hidden), noisy = positions ? at::empty_like(hidden) : at::empty({0}, hidden.options());
  Tensor mean = at::empty(row_sizes, row_options), rstd = at::empty_like(mean), total = at::empty_like(mean), square = at::empty_like(mean);
  GRT_DISPATCH(hidden, "gate_head", [&] {
    using R = Real<scalar_t>;
    launch(
        Head<scalar_t>{hidden.const_data_ptr<scalar_t>(), weight.const_data_ptr<scalar_t>(), noise.of<scalar_t>(sigma), R(eps), rms,
                       row_count(hidden), hidden.size(-1), normed.mutable_data_ptr<scalar_t>(), noisy.mutable_data_ptr<scalar_t>(),
                       mean.mutable_data_ptr<R>(), rstd.mutable_data_ptr<R>(), total.mutable_data_ptr<R>(), square.mutable_data_ptr<R>()},
        hidden);
  });
  return {normed, noisy, mean, rstd, total, square};
}

std::tuple<Tensor, Tensor> gate_head_backward(const OptionalTensor& grad_normed_, const OptionalTensor& grad_noisy_,
                                              const OptionalTensor& grad_total_, const OptionalTensor& grad_square_, const Tensor& hidden_,
                                              const Tensor& weight_, const Tensor& mean_, const Tensor& rstd_, bool rms) {
  const Tensor hidden = state(hidden_), weight = per_channel(weight_, hidden, "weight");
  const Tensor mean = per_row(mean_, hidden, "mean"), rstd = per_row(rstd_, hidden, "rstd");
  const auto rows = [&](const OptionalTensor& x, const char* name) { return x ? same_shape(*x, hidden, name) : Tensor(); };
  const auto row_sums = [&](const OptionalTensor& x, const char* name) { return x ? per_row(*x, hidden, name) : Tensor(); };
  const Tensor grad_normed = rows(grad_normed_, "grad_normed"), grad_noisy = rows(grad_noisy_, "grad_noisy");
  const Tensor grad_total = row_sums(grad_total_, "grad_total"), grad_square = row_sums(grad_square_, "grad_square");
  Tensor grad_hidden = at::empty_like(hidden);
  Tensor grad_weight = at::zeros({partial_rows(hidden), hidden.size(-1)}, mean.options());
  GRT_DISPATCH(hidden, "gate_head_backward", [&] {
    using R = Real<scalar_t>;
    launch(HeadBackward<scalar_t>{pointer_or_null<scalar_t>(grad_normed), pointer_or_null<scalar_t>(grad_noisy),
                                  pointer_or_null<R>(grad_total), pointer_or_null<R>(grad_square), hidden.const_data_ptr<scalar_t>(),
                                  weight.const_data_ptr<scalar_t>(), mean.const_data_ptr<R>(), rstd.const_data_ptr<R>(), rms,
                                  row_count(hidden), hidden.size(-1), grad_hidden.mutable_data_ptr<scalar_t>(),
                                  grad_weight.mutable_data_ptr<R>()},
           hidden);
  });
  return {grad_hidden, grad_weight.sum(0).to(weight.scalar_type())};
}

// The operands of both directions of the tail.
struct TailTensors {
  Tensor hidden, logits, bias, candidate;
  NoiseTensors noise;
  double initial_bias, temperature, sigma;
  bool noise_per_token;

  TailTensors(const Tensor& logits_, const Tensor& bias_, const Tensor& hidden_, const Tensor& candidate_, const OptionalTensor& positions,
              const OptionalTensor& counters, double initial_bias_, double temperature_, double sigma_, bool noise_per_token_)
      : hidden(state(hidden_)),
        logits(same_shape(logits_, hidden_, "logits")),
        bias(per_channel(bias_, hidden_, "bias")),
        candidate(same_shape(candidate_, hidden_, "candidate")),
        noise(positions, counters, hidden_),
        initial_bias(initial_bias_),
        temperature(temperature_),
        sigma(sigma_),
        noise_per_token(noise_per_token_) {}

  template <typename T>
  Tail<T> of(T* updated, Real<T>* gate_mean) const {
    return {logits.const_data_ptr<T>(),
            bias.const_data_ptr<T>(),
            hidden.const_data_ptr<T>(),
            candidate.const_data_ptr<T>(),
            noise.of<T>(sigma),
            noise_per_token,
            Real<T>(initial_bias),
            Real<T>(1 / temperature),
            row_count(hidden),
            hidden.size(-1),
            updated,
            gate_mean};
  }
};

std::tuple<Tensor, Tensor> gate_tail(const Tensor& logits, const Tensor& bias, const Tensor& hidden, const Tensor& candidate,
                                     const OptionalTensor& positions, const OptionalTensor& counters, double initial_bias,
                                     double temperature, double sigma, bool noise_per_token) {
  const TailTensors operands(logits, bias, hidden, candidate, positions, counters, initial_bias, temperature, sigma, noise_per_token);
  Tensor updated = at::empty_like(operands.hidden);
  Tensor gate_mean = at::empty(hidden.sizes().slice(0, hidden.dim() - 1), hidden.options().dtype(wide(hidden)));
  GRT_DISPATCH(hidden, "gate_tail", [&] {
    launch(operands.of<scalar_t>(updated.mutable_data_ptr<scalar_t>(), gate_mean.mutable_data_ptr<Real<scalar_t>>()), hidden);
  });
  return {updated, gate_mean};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gate_tail_backward(const Tensor& grad_, const Tensor& logits, const Tensor& bias,
                                                              const Tensor& hidden, const Tensor& candidate,
                                                              const OptionalTensor& positions, const OptionalTensor& counters,
                                                              double initial_bias, double temperature, double sigma, bool noise_per_token) {
  const TailTensors operands(logits, bias, hidden, candidate, positions, counters, initial_bias, temperature, sigma, noise_per_token);
  const Tensor grad = same_shape(grad_, hidden, "grad");
  Tensor grad_logits = at::empty_like(grad), grad_hidden = at::empty_like(grad), grad_candidate = at::empty_like(grad);
  Tensor grad_bias = at::zeros({partial_rows(hidden), hidden.size(-1)}, hidden.options().dtype(wide(hidden)));
  GRT_DISPATCH(hidden, "gate_tail_backward", [&] {
    launch(TailBackward<scalar_t>{operands.of<scalar_t>(nullptr, nullptr), grad.const_data_ptr<scalar_t>(),
                                  grad_logits.mutable_data_ptr<scalar_t>(), grad_hidden.mutable_data_ptr<scalar_t>(),
                                  grad_candidate.mutable_data_ptr<scalar_t>(), grad_bias.mutable_data_ptr<Real<scalar_t>>()},
           hidden);
  });
  return {grad_logits, grad_bias.sum(0).to(bias.scalar_type()), grad_hidden, grad_candidate};
}

// Counters int64 [n, 4] -> words int64 [n, 4], for tests of the generator on each device.
Tensor philox(const Tensor& counters_, int64_t seed) {
  TORCH_CHECK(counters_.dim() == 2 && counters_.size(1) == 4 && counters_.scalar_type() == at::kLong, "grt: counters are int64 [n, 4]");
  const Tensor counters = counters_.contiguous();
  Tensor words = at::empty_like(counters);
  const int64_t* in = counters.const_data_ptr<int64_t>();
  int64_t* out = words.mutable_data_ptr<int64_t>();
#ifdef GRT_CUDA
  if (counters.is_cuda()) {
    const c10::cuda::CUDAGuard guard(counters.device());
    cuda::philox(in, seed, counters.size(0), out, c10::cuda::getCurrentCUDAStream().stream());
    return words;
  }
#endif
  for (int64_t i = 0; i < 4 * counters.size(0); i += 4) {
    const Words made = philox4x32({{uint32_t(in[i]), uint32_t(in[i + 1]), uint32_t(in[i + 2]), uint32_t(in[i + 3])}}, uint32_t(seed),
                                  uint32_t(uint64_t(seed) >> 32));
    std::copy(made.word, made.word + 4, out + i);
  }
  return words;
}

void register_kernels(torch::Library& m) {
  m.impl("gate_head", gate_head);
  m.impl("gate_head_backward", gate_head_backward);
  m.impl("gate_tail", gate_tail);
  m.impl("gate_tail_backward", gate_tail_backward);
  m.impl("philox", philox);
}

}  // namespace

TORCH_LIBRARY(grt, m) {
  m.def(
      "gate_head(Tensor hidden, Tensor weight, Tensor? positions, Tensor? counters, float sigma, float eps, bool rms)"
      " -> (Tensor normed, Tensor noisy, Tensor mean, Tensor rstd, Tensor total, Tensor square)");
  m.def(
      "gate_head_backward(Tensor? grad_normed, Tensor? grad_noisy, Tensor? grad_total, Tensor? grad_square, Tensor hidden, Tensor weight,"
      " Tensor mean, Tensor rstd, bool rms) -> (Tensor grad_hidden, Tensor grad_weight)");
  m.def(
      "gate_tail(Tensor logits, Tensor bias, Tensor hidden, Tensor candidate, Tensor? positions, Tensor? counters, float initial_bias,"
      " float temperature, float sigma, bool noise_per_token) -> (Tensor updated, Tensor gate_mean)");
  m.def(
      "gate_tail_backward(Tensor grad, Tensor logits, Tensor bias, Tensor hidden, Tensor candidate, Tensor? positions, Tensor? counters,"
      " float initial_bias, float temperature, float sigma, bool noise_per_token)"
      " -> (Tensor grad_logits, Tensor grad_bias, Tensor grad_hidden, Tensor grad_candidate)");
  m.def("philox(Tensor counters, int seed) -> Tensor");
}

TORCH_LIBRARY_IMPL(grt, CPU, m) { register_kernels(m); }

#ifdef GRT_CUDA
TORCH_LIBRARY_IMPL(grt, CUDA, m) { register_kernels(m); }
#endif

}  // namespace grt
