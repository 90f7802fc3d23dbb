// The gate operators on a CPU: rows shared out to torch's threads, channels in vector code.
//
// Each kernel is compiled for several instruction sets and the loader takes the best that the machine has, so that a file
// built on a login node runs on any node. Sums over rows are over a fixed number of chunks, whatever the number of threads.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "gate_kernels.h"
#include "gate_math.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define GRT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define GRT_BASELINE __attribute__((target("default")))
#define GRT_AVX512
#else
#define GRT_CLONES
#define GRT_BASELINE
#endif

namespace grt {
namespace {

constexpr int64_t BLOCK = 256;      // channels at once: all that is computed of them stays in the first-level cache
constexpr int64_t MAX_CHUNKS = 64;  // of rows; each has its own partial column sums

GRT_INLINE double load(const double& x) { return x; }
GRT_INLINE float load(const float& x) { return x; }
GRT_INLINE float load(const c10::BFloat16& x) { return from_bits(uint32_t{x.x} << 16); }
GRT_INLINE float load(const c10::Half& x) { return static_cast<float>(x); }

GRT_INLINE void store(double& out, double x) { out = x; }
GRT_INLINE void store(float& out, float x) { out = x; }
GRT_INLINE void store(c10::Half& out, float x) { out = c10::Half(x); }
GRT_INLINE void store(c10::BFloat16& out, float x) {
  const uint32_t bits = to_bits(x), rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  out.x = uint16_t(x != x ? 0x7FC0u : rounded);
}

// Row `row` widened; zeros where there is no tensor.
template <typename T>
GRT_INLINE void load_row(const T* __restrict in, int64_t row, int64_t channels, Real<T>* __restrict out) {
  if (in == nullptr) {
    std::fill(out, out + channels, Real<T>(0));
    return;
  }
  in += row * channels;
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) out[c] = load(in[c]);
}

template <typename T>
GRT_INLINE void store_row(const Real<T>* __restrict in, int64_t row, int64_t channels, T* __restrict out) {
  out += row * channels;
#pragma omp simd
  for (int64_t c = 0; c < channels; ++c) store(out[c], in[c]);
}

constexpr int32_t GROUPS = BLOCK / 4;  // Philox calls for a block

// The words of groups first .. first + GROUPS - 1.
GRT_BASELINE void philox_block(const NoiseRow& row, uint32_t first, uint32_t (&words)[4][GROUPS]) {
#pragma omp simd
  for (int32_t group = 0; group < GROUPS; ++group) {
    const Words made = row.words(first + uint32_t(group));
    words[0][group] = made.word[0];
    words[1][group] = made.word[1];
    words[2][group] = made.word[2];
    words[3][group] = made.word[3];
  }
}

#ifdef GRT_AVX512
// Compilers make three multiplications of each widening one; this makes one, and is twice as fast.
__attribute__((target("arch=x86-64-v4"))) void philox_block(const NoiseRow& row, uint32_t first, uint32_t (&words)[4][GROUPS]) {
  const __m512i multiplier0 = _mm512_set1_epi64(0xD2511F53), multiplier2 = _mm512_set1_epi64(0xCD9E8D57);
  const __m512i lanes = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  for (int32_t group = 0; group < GROUPS; group += 16) {
    __m512i c[2][4];  // of two times 8 groups, a word in the lower half of each lane
    for (int half = 0; half < 2; ++half) {
      c[half][0] = _mm512_add_epi64(_mm512_set1_epi64(int64_t{first} + group + 8 * half), lanes);
      c[half][1] = _mm512_set1_epi64(row.position_low);
      c[half][2] = _mm512_set1_epi64(row.position_high);
      c[half][3] = _mm512_setzero_si512();
    }
    uint32_t key0 = row.key0, key1 = row.key1;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      for (int half = 0; half < 2; ++half) {
        __m512i* const x = c[half];
        const __m512i product0 = _mm512_mul_epu32(x[0], multiplier0), product2 = _mm512_mul_epu32(x[2], multiplier2);
        constexpr int XOR3 = 0x96;
        x[0] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product2, 32), x[1], _mm512_set1_epi64(key0), XOR3);
        x[2] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(product0, 32), x[3], _mm512_set1_epi64(key1), XOR3);
        x[1] = product2;
        x[3] = product0;
      }
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    for (int half = 0; half < 2; ++half) {
      for (int k = 0; k < 4; ++k) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(&words[k][group + 8 * half]), _mm512_cvtepi64_epi32(c[half][k]));
      }
    }
  }
}
#endif

// sigma times the normals of one token's channels. Four normals are made at a time, so out holds channels rounded up to a BLOCK.
template <typename T>
GRT_INLINE void element_noise(const Noise<T>& noise, int64_t row, Stream stream, int64_t channels, Real<T>* __restrict out) {
  const NoiseRow noise_row(noise.counters[0], noise.counters[1], noise.positions[row], stream);
  const Real<T> sigma = noise.sigma;
  uint32_t words[4][GROUPS];
  for (int64_t first = 0; first < channels; first += BLOCK) {
    philox_block(noise_row, uint32_t(first / 4), words);
    Real<T>* __restrict block = out + first;
#pragma omp simd
    for (int32_t group = 0; group < GROUPS; ++group) {
      const Normals normals = box_muller({{words[0][group], words[1][group], words[2][group], words[3][group]}});
      block[4 * group] = sigma * normals.value[0];
      block[4 * group + 1] = sigma * normals.value[1];
      block[4 * group + 2] = sigma * normals.value[2];
      block[4 * group + 3] = sigma * normals.value[3];
    }
  }
}

// Rows of numbers that a thread works on, widened.
template <typename R>
class Scratch {
 public:
  Scratch(int rows, int64_t channels) : stride_((channels + BLOCK - 1) / BLOCK * BLOCK), storage_(rows * stride_) {}
  R* operator[](int row) { return storage_.data() + row * stride_; }

 private:
  int64_t stride_;
  std::vector<R> storage_;
};

template <typename T>
GRT_INLINE void head_rows(const Head<T>& a, int64_t begin, int64_t end, Scratch<Real<T>>& scratch) {
  using R = Real<T>;
  const int64_t d = a.channels;
  R* __restrict hidden = scratch[0], * __restrict weight = scratch[1], * __restrict normed = scratch[2], * __restrict noise = scratch[3];
  load_row(a.weight, 0, d, weight);
  for (int64_t row = begin; row < end; ++row) {
    load_row(a.hidden, row, d, hidden);
    R mean = 0, variance = 0, total = 0, square = 0;
#pragma omp simd reduction(+ : mean)
    for (int64_t c = 0; c < d; ++c) mean += hidden[c];
    mean = a.rms ? R(0) : mean / R(d);
#pragma omp simd reduction(+ : variance)
    for (int64_t c = 0; c < d; ++c) variance += (hidden[c] - mean) * (hidden[c] - mean);
    const R rstd = R(1) / std::sqrt(variance / R(d) + a.eps);
#pragma omp simd
    for (int64_t c = 0; c < d; ++c) normed[c] = (hidden[c] - mean) * rstd * weight[c];
    store_row(normed, row, d, a.normed);
    load_row<T>(a.normed, row, d, normed);  // as it was rounded: that is what the next norm sees
#pragma omp simd reduction(+ : total, square)
    for (int64_t c = 0; c < d; ++c) {
      total += normed[c];
      square += normed[c] * normed[c];
    }
    a.mean[row] = mean;
    a.rstd[row] = rstd;
    a.total[row] = total;
    a.square[row] = square;
    if (a.noise.positions == nullptr) continue;
    element_noise(a.noise, row, STATE, d, noise);
#pragma omp simd
    for (int64_t c = 0; c < d; ++c) noise[c] += hidden[c];
    store_row(noise, row, d, a.noisy);
  }
}

template <typename T>
GRT_INLINE void head_backward_rows(const HeadBackward<T>& a, int64_t begin, int64_t end, Scratch<Real<T>>& scratch,
                                   Real<T>* __restrict grad_weight) {
  using R = Real<T>;
  const int64_t d = a.channels;
  R* __restrict unit = scratch[0], * __restrict weight = scratch[1], * __restrict grad = scratch[2], * __restrict grad_noisy = scratch[3];
  load_row(a.weight, 0, d, weight);
  for (int64_t row = begin; row < end; ++row) {
    load_row(a.hidden, row, d, unit);
    load_row(a.grad_normed, row, d, grad);
    load_row(a.grad_noisy, row, d, grad_noisy);
    const R mean = a.mean[row], rstd = a.rstd[row];
    const R grad_total = a.grad_total == nullptr ? R(0) : a.grad_total[row];
    const R grad_square = a.grad_square == nullptr ? R(0) : R(2) * a.grad_square[row];
    R sum = 0, projection = 0;  // of the gradient of the norm before its weight: itself, and along that norm
#pragma omp simd reduction(+ : sum, projection)
    for (int64_t c = 0; c < d; ++c) {
      unit[c] = (unit[c] - mean) * rstd;
      const R whole = grad[c] + grad_total + grad_square * unit[c] * weight[c];
      grad_weight[c] += whole * unit[c];
      grad[c] = whole * weight[c];
      sum += grad[c];
      projection += grad[c] * unit[c];
    }
    sum = a.rms ? R(0) : sum / R(d);
    projection /= R(d);
#pragma omp simd
    for (int64_t c = 0; c < d; ++c) grad[c] = grad_noisy[c] + rstd * (grad[c] - sum - unit[c] * projection);
    store_row(grad, row, d, a.grad_hidden);
  }
}

// The gate of one row, from logits in `g`.
template <typename T>
GRT_INLINE void gate_row(const Tail<T>& a, int64_t row, const Real<T>* __restrict bias, Real<T>* __restrict noise, Real<T>* __restrict g) {
  const int64_t d = a.channels;
  const Real<T> inverse_temperature = a.inverse_temperature;
  load_row(a.logits, row, d, g);
  if (a.noise.positions != nullptr && !a.noise_per_token) {
    element_noise(a.noise, row, GATE, d, noise);
#pragma omp simd
    for (int64_t c = 0; c < d; ++c) g[c] = gate(g[c], bias[c], inverse_temperature, noise[c]);
    return;
  }
  Real<T> token_noise = 0;
  if (a.noise.positions != nullptr) {
    token_noise = a.noise.sigma * NoiseRow(a.noise.counters[0], a.noise.counters[1], a.noise.positions[row], GATE).normals(0).value[0];
  }
#pragma omp simd
  for (int64_t c = 0; c < d; ++c) g[c] = gate(g[c], bias[c], inverse_temperature, token_noise);
}

template <typename T>
GRT_INLINE void load_bias(const Tail<T>& a, Real<T>* __restrict bias) {
  load_row(a.bias, 0, a.channels, bias);
#pragma omp simd
  for (int64_t c = 0; c < a.channels; ++c) bias[c] += a.initial_bias;
}

template <typename T>
GRT_INLINE void tail_rows(const Tail<T>& a, int64_t begin, int64_t end, Scratch<Real<T>>& scratch) {
  using R = Real<T>;
  const int64_t d = a.channels;
  R* __restrict bias = scratch[0], * __restrict g = scratch[1], * __restrict hidden = scratch[2], * __restrict candidate = scratch[3];
  load_bias(a, bias);
  for (int64_t row = begin; row < end; ++row) {
    gate_row(a, row, bias, hidden, g);
    load_row(a.hidden, row, d, hidden);
    load_row(a.candidate, row, d, candidate);
    R total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t c = 0; c < d; ++c) {
      total += g[c];
      hidden[c] = blend(g[c], hidden[c], candidate[c]);
    }
    store_row(hidden, row, d, a.updated);
    a.gate_mean[row] = total / R(d);
  }
}

template <typename T>
GRT_INLINE void tail_backward_rows(const TailBackward<T>& b, int64_t begin, int64_t end, Scratch<Real<T>>& scratch,
                                   Real<T>* __restrict grad_bias) {
  using R = Real<T>;
  const Tail<T>& a = b.forward;
  const int64_t d = a.channels;
  const R inverse_temperature = a.inverse_temperature;
  R* __restrict bias = scratch[0], * __restrict g = scratch[1], * __restrict hidden = scratch[2], * __restrict candidate = scratch[3];
  R* __restrict grad = scratch[4];
  load_bias(a, bias);
  for (int64_t row = begin; row < end; ++row) {
    gate_row(a, row, bias, hidden, g);
    load_row(a.hidden, row, d, hidden);
    load_row(a.candidate, row, d, candidate);
    load_row(b.grad_updated, row, d, grad);
#pragma omp simd
    for (int64_t c = 0; c < d; ++c) {
      const BlendGradients<R> back = blend_backward(grad[c], g[c], hidden[c], candidate[c], inverse_temperature);
      grad_bias[c] += back.logit;
      g[c] = back.logit;
      hidden[c] = back.hidden;
      candidate[c] = back.candidate;
    }
    store_row(g, row, d, b.grad_logits);
    store_row(hidden, row, d, b.grad_hidden);
    store_row(candidate, row, d, b.grad_candidate);
  }
}

// Templates cannot be compiled for several instruction sets; functions of one type can.
#define GRT_KERNELS(T)                                                                                                                \
  GRT_CLONES void run(const Head<T>& a, int64_t begin, int64_t end, Scratch<Real<T>>& scratch) { head_rows(a, begin, end, scratch); } \
  GRT_CLONES void run(const Tail<T>& a, int64_t begin, int64_t end, Scratch<Real<T>>& scratch) { tail_rows(a, begin, end, scratch); } \
  GRT_CLONES void run(const HeadBackward<T>& a, int64_t begin, int64_t end, Scratch<Real<T>>& scratch, Real<T>* sums) {               \
    head_backward_rows(a, begin, end, scratch, sums);                                                                                 \
  }                                                                                                                                   \
  GRT_CLONES void run(const TailBackward<T>& a, int64_t begin, int64_t end, Scratch<Real<T>>& scratch, Real<T>* sums) {               \
    tail_backward_rows(a, begin, end, scratch, sums);                                                                                 \
  }
GRT_KERNELS(double)
GRT_KERNELS(float)
GRT_KERNELS(c10::BFloat16)
GRT_KERNELS(c10::Half)
#undef GRT_KERNELS

constexpr int64_t ELEMENTS_PER_TASK = 1 << 14;

template <typename Arguments, typename R>
void run_rows(const Arguments& a, const R*) {
  const int64_t grain = std::max<int64_t>(1, ELEMENTS_PER_TASK / std::max<int64_t>(1, a.channels));
  at::parallel_for(0, a.rows, grain, [&](int64_t begin, int64_t end) {
    Scratch<R> scratch(4, a.channels);
    run(a, begin, end, scratch);
  });
}

// With partial column sums: of a fixed number of chunks of rows.
template <typename Arguments, typename R>
void run_chunks(const Arguments& a, int64_t rows, int64_t channels, R* sums) {
  const int64_t chunks = cpu::partial_rows(rows);
  at::parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    Scratch<R> scratch(5, channels);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      run(a, chunk * rows / chunks, (chunk + 1) * rows / chunks, scratch, sums + chunk * channels);
    }
  });
}

}  // namespace

namespace cpu {

int64_t partial_rows(int64_t rows) { return std::clamp<int64_t>(rows / 16, 1, MAX_CHUNKS); }

template <typename T>
void launch(const Head<T>& a) {
  run_rows(a, a.mean);
}

template <typename T>
void launch(const Tail<T>& a) {
  run_rows(a, a.gate_mean);
}

template <typename T>
void launch(const HeadBackward<T>& a) {
  run_chunks(a, a.rows, a.channels, a.grad_weight);
}

template <typename T>
void launch(const TailBackward<T>& a) {
  run_chunks(a, a.forward.rows, a.forward.channels, a.grad_bias);
}

#define GRT_INSTANTIATE(T)                      \
  template void launch(const Head<T>&);         \
  template void launch(const HeadBackward<T>&); \
  template void launch(const Tail<T>&);         \
  template void launch(const TailBackward<T>&);
GRT_INSTANTIATE(double)
GRT_INSTANTIATE(float)
GRT_INSTANTIATE(c10::BFloat16)
GRT_INSTANTIATE(c10::Half)
#undef GRT_INSTANTIATE

}  // namespace cpu
}  // namespace grt
