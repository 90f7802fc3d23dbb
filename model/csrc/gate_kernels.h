// What the kernels of the gate operators are given, on either device: raw pointers to contiguous rows of `channels` numbers.
//
// T is how tensors are stored: double (for gradient checks), float, c10::BFloat16, c10::Half. Sums and statistics are Real<T>.
// Null pointers stand for what is absent: noise (positions), or gradients that nothing came back for.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

#ifdef GRT_CUDA
#include <cuda_runtime_api.h>
#endif

namespace grt {

template <typename T>
using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;

// One draw of noise: normals of `sigma` at each token's global position.
template <typename T>
struct Noise {
  const int64_t* positions;  // [rows]; null: no noise
  const int64_t* counters;   // seed, recurrence
  Real<T> sigma;
};

// normed = weight * norm(hidden), noisy = hidden + noise, and sums over the channels of normed for the norm that follows.
template <typename T>
struct Head {
  const T *hidden, *weight;
  Noise<T> noise;
  Real<T> eps;
  bool rms;
  int64_t rows, channels;
  T *normed, *noisy;
  Real<T>*mean, *rstd, *total, *square;  // [rows]
};

template <typename T>
struct HeadBackward {
  const T *grad_normed, *grad_noisy;       // may be null
  const Real<T>*grad_total, *grad_square;  // [rows], may be null
  const T *hidden, *weight;
  const Real<T>*mean, *rstd;
  bool rms;
  int64_t rows, channels;
  T* grad_hidden;
  Real<T>* grad_weight;  // [partial_rows(rows), channels]: partial sums, zero at the start
};

// updated = g hidden + (1 - g) candidate, g = sigmoid((logits + bias + initial_bias) inverse_temperature + noise).
template <typename T>
struct Tail {
  const T *logits, *bias, *hidden, *candidate;
  Noise<T> noise;
  bool noise_per_token;  // one normal for all channels
  Real<T> initial_bias, inverse_temperature;
  int64_t rows, channels;
  T* updated;
  Real<T>* gate_mean;  // [rows]
};

template <typename T>
struct TailBackward {
  Tail<T> forward;
  const T* grad_updated;
  T *grad_logits, *grad_hidden, *grad_candidate;
  Real<T>* grad_bias;  // [partial_rows(rows), channels]: partial sums, zero at the start
};

namespace cpu {
int64_t partial_rows(int64_t rows);
template <typename T>
void launch(const Head<T>& arguments);
template <typename T>
void launch(const HeadBackward<T>& arguments);
template <typename T>
void launch(const Tail<T>& arguments);
template <typename T>
void launch(const TailBackward<T>& arguments);
}  // namespace cpu

#ifdef GRT_CUDA
namespace cuda {
int64_t partial_rows(int64_t rows);
template <typename T>
void launch(const Head<T>& arguments, cudaStream_t stream);
template <typename T>
void launch(const HeadBackward<T>& arguments, cudaStream_t stream);
template <typename T>
void launch(const Tail<T>& arguments, cudaStream_t stream);
template <typename T>
void launch(const TailBackward<T>& arguments, cudaStream_t stream);
void philox(const int64_t* counters, int64_t seed, int64_t count, int64_t* words, cudaStream_t stream);  // [count, 4] each
}  // namespace cuda
#endif

}  // namespace grt
