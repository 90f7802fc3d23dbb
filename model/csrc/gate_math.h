// Scalar maths of the gate operators, the same for CPU and CUDA: Philox4x32-10, Box-Muller, the sigmoid.
//
// Everything is branchless, so that compilers turn loops over it into vector code. Nothing calls libm for float: polynomials
// are good to one or two units in the last place (the noise is nearer to exact than model/noise.py in fp32), and give the same
// number on every machine up to fused multiply-adds; a GPU's exponential, reciprocal and square root are its own. double, for
// gradient checks, goes through libm.
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

GRT_INLINE uint64_t product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t out;  // nvcc adds instructions to the plain product
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(out) : "r"(a), "r"(b));
  return out;
#else
  return uint64_t{a} * b;
#endif
}

// Philox4x32-10 (Salmon et al., SC11).
GRT_INLINE Words philox4x32(Words counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = product(c0, 0xD2511F53u), product1 = product(c2, 0xCD9E8D57u);
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

// Overflows to infinity and underflows to zero; NaN stays NaN. Polynomial: Cephes' expf.
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

// Two normals of words 0 and 1, two of words 2 and 3. The upper 24 bits of a word, n, stand for (n + 1) / 2^24, in (0, 1].
// The polynomials are minimax fits of error below 3e-8.
//
// sqrt(-2 ln u): the mantissa of u is taken to [sqrt(1/2), sqrt(2)).
GRT_INLINE float radius(uint32_t word) {
  const uint32_t bits = to_bits(float(int32_t(word >> 8) + 1));
  const uint32_t exponent = (bits - (0x3F3504F3u + (24u << 23))) & 0xFF800000u;
  const float f = from_bits(bits - exponent - (24u << 23)) - 1.0f;
  float p = -0.17444487f;
  p = p * f + 0.28733575f;
  p = p * f - 0.29904565f;
  p = p * f + 0.33124805f;
  p = p * f - 0.39913666f;
  p = p * f + 0.50004148f;
  p = p * f - 0.66668373f;
  p = p * f + 0.99999976f;
  p = p * f - 2.0f;
  return square_root(p * f - float(int32_t(exponent)) * 1.6525918e-7f);  // 2 ln 2 / 2^23
}

struct Direction {
  float cosine, sine;
};

// Of u turns, to the nearest half turn (the upper bit of `sum`) and what is left, in [-1/4, 1/4) turns and exact (the next 23).
GRT_INLINE Direction direction(uint32_t word) {
  const uint32_t sum = word + 0x40000100u;
  const float turns = from_bits((sum << 1 >> 9) | 0x3F000000u) - 0.75f;
  const float square = turns * turns;
  float s = 39.710918f;
  s = s * square - 76.574989f;
  s = s * square + 81.602234f;
  s = s * square - 41.341679f;
  s = s * square + 6.2831853f;
  s = s * turns;
  float c = -25.006794f;
  c = c * square + 60.148205f;
  c = c * square - 85.453827f;
  c = c * square + 64.939354f;
  c = c * square - 19.739208f;
  c = c * square + 1.0f;
  const uint32_t sign = sum & 0x80000000u;
  return {from_bits(to_bits(c) ^ sign), from_bits(to_bits(s) ^ sign)};
}

GRT_INLINE Normals box_muller(Words words) {
  const float radius0 = radius(words.word[0]), radius1 = radius(words.word[2]);
  const Direction direction0 = direction(words.word[1]), direction1 = direction(words.word[3]);
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
