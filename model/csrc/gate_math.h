// Scalar maths of the gate operators, the same for CPU and CUDA: Philox4x32-10, Box-Muller, the sigmoid.
//
// Everything is branchless, so that compilers turn loops over it into vector code. Nothing calls libm for float: the
// polynomials are Cephes' (expf, logf, sinf, cosf), good to one or two units in the last place, and give the same number on
// every machine up to fused multiply-adds. double, for gradient checks, goes through libm.
//
// model/noise.py is the description of the noise field (key, counter, order of the normals); the two must agree.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define GRT_INLINE __host__ __device__ __forceinline__
#else
#define GRT_INLINE inline __attribute__((always_inline))
#endif

namespace grt {

enum Stream : uint32_t { STATE = 0, GATE = 1 };  // model.noise.Stream

struct Words {
  uint32_t word[4];
};

struct Normals {
  float value[4];
};

// Philox4x32-10 (Salmon et al., SC11).
GRT_INLINE Words philox4x32(Words counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0, product1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t next0 = uint32_t(product1 >> 32) ^ c1 ^ key0, next2 = uint32_t(product0 >> 32) ^ c3 ^ key1;
    c1 = uint32_t(product1);
    c3 = uint32_t(product0);
    c0 = next0;
    c2 = next2;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

GRT_INLINE float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

GRT_INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

GRT_INLINE float power_of_two(int32_t n) { return from_bits(uint32_t(n + 127) << 23); }  // -126 <= n <= 127

// Rounds to the nearest integer; |x| < 2^22.
GRT_INLINE float round_to_integer(float x) { return (x + 12582912.0f) - 12582912.0f; }

#ifdef __CUDA_ARCH__
// The GPU's own instructions: one or two units in the last place, and none of the branches of the exactly rounded ones.
GRT_INLINE float exponential(float x) {
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x * 1.44269504088896341f));
  return x;
}

GRT_INLINE float reciprocal(float x) {
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
}

GRT_INLINE float square_root(float x) {
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
  return x;
}
#else
GRT_INLINE float reciprocal(float x) { return 1.0f / x; }

GRT_INLINE float square_root(float x) { return ::sqrtf(x); }

// Overflows to infinity and underflows to zero; NaN stays NaN.
GRT_INLINE float exponential(float x) {
  x = x > 110.0f ? 110.0f : x;
  x = x < -110.0f ? -110.0f : x;
  const float n = round_to_integer(x * 1.44269504088896341f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t whole = int32_t(n), half = whole >> 1;  // in two steps: 2^n alone may leave the range
  return p * power_of_two(half) * power_of_two(whole - half);
}
#endif

GRT_INLINE double exponential(double x) { return ::exp(x); }

GRT_INLINE double reciprocal(double x) { return 1.0 / x; }

// Natural logarithm of a normal positive number.
GRT_INLINE float logarithm(float x) {
  const uint32_t shifted = to_bits(x) - 0x3F3504F3u;  // the mantissa to [sqrt(1/2), sqrt(2))
  const float n = float(int32_t(shifted) >> 23);
  const float f = from_bits((shifted & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f;
  const float square = f * f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const float tail = p * f * square - n * 2.12194440e-4f - 0.5f * square;
  return f + tail + n * 0.693359375f;
}

struct SineCosine {
  float sine, cosine;
};

// Of `turns` full turns, 0 <= turns <= 1: the reduction to an eighth of a turn is exact.
GRT_INLINE SineCosine sine_cosine(float turns) {
  const float quarter = round_to_integer(turns * 4.0f);
  const float angle = (turns - quarter * 0.25f) * 6.283185307179586f;
  const float square = angle * angle;
  float s = -1.9515295891e-4f;
  s = s * square + 8.3321608736e-3f;
  s = s * square - 1.6666654611e-1f;
  s = s * square * angle + angle;
  float c = 2.443315711809948e-5f;
  c = c * square - 1.388731625493765e-3f;
  c = c * square + 4.166664568298827e-2f;
  c = c * square * square - 0.5f * square + 1.0f;
  const uint32_t q = uint32_t(int32_t(quarter));
  const uint32_t swap = 0u - (q & 1u);
  const uint32_t sine = (to_bits(c) & swap) | (to_bits(s) & ~swap), cosine = (to_bits(s) & swap) | (to_bits(c) & ~swap);
  return {from_bits(sine ^ ((q & 2u) << 30)), from_bits(cosine ^ (((q + 1u) & 2u) << 30))};
}

// In (0, 1], from the upper 24 bits.
GRT_INLINE float uniform(uint32_t word) { return float(int32_t(word >> 8) + 1) * 5.9604644775390625e-8f; }

// Two normals of words 0 and 1, two of words 2 and 3.
GRT_INLINE Normals box_muller(Words words) {
  const float radius0 = square_root(-2.0f * logarithm(uniform(words.word[0]))), radius1 = square_root(-2.0f * logarithm(uniform(words.word[2])));
  const SineCosine direction0 = sine_cosine(uniform(words.word[1])), direction1 = sine_cosine(uniform(words.word[3]));
  return {{radius0 * direction0.cosine, radius0 * direction0.sine, radius1 * direction1.cosine, radius1 * direction1.sine}};
}

// Where one token of one draw lies in the noise field.
struct NoiseRow {
  uint32_t key0, key1, position_low, position_high;

  GRT_INLINE NoiseRow(int64_t seed, int64_t recurrence, int64_t position, Stream stream)
      : key0(uint32_t(seed)),
        key1(uint32_t(uint64_t(seed) >> 32)),
        position_low(uint32_t(position)),
        position_high(uint32_t(uint64_t(position) >> 32) | (uint32_t(stream) << 16) | (uint32_t(recurrence) << 20)) {}

  GRT_INLINE Words words(uint32_t group) const { return philox4x32({{group, position_low, position_high, 0}}, key0, key1); }

  // Standard normals of channels 4 `group` .. 4 `group` + 3.
  GRT_INLINE Normals normals(uint32_t group) const { return box_muller(words(group)); }
};

template <typename Real>
GRT_INLINE Real sigmoid(Real x) {
  return reciprocal(Real(1) + exponential(-x));
}

// h <- g h + (1 - g) o with g = sigmoid((a + b) / tau + noise).
template <typename Real>
GRT_INLINE Real gate(Real logit, Real bias, Real inverse_temperature, Real noise) {
  return sigmoid((logit + bias) * inverse_temperature + noise);
}

template <typename Real>
GRT_INLINE Real blend(Real g, Real hidden, Real candidate) {
  return g * hidden + (Real(1) - g) * candidate;
}

template <typename Real>
struct BlendGradients {
  Real logit, hidden, candidate;
};

template <typename Real>
GRT_INLINE BlendGradients<Real> blend_backward(Real grad, Real g, Real hidden, Real candidate, Real inverse_temperature) {
  return {grad * (hidden - candidate) * g * (Real(1) - g) * inverse_temperature, grad * g, grad * (Real(1) - g)};
}

}  // namespace grt
