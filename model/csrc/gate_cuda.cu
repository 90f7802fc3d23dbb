// The gate operators on NVIDIA GPUs. A thread handles a piece of a row at a time: adjacent channels that are whole 16-byte
// accesses and whole Philox calls.
//
// Forward, a block is one row. Backward, a block has a chunk of the rows (every n-th): its threads sum their own channels over
// those rows in a fixed order, so column sums are the same every time. Nothing here runs without a GPU; the same kernels run on a
// CPU, as plain C++, in tests/model/test_cuda_kernels.py.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "gate_kernels.h"
#include "gate_math.h"

namespace grt {
namespace {

constexpr unsigned WARP = 32;
constexpr unsigned MAX_THREADS = 1024;  // of a block
constexpr unsigned TILE_ROWS = 8;       // tail backward: warps of a block, each with its own rows of one tile of channels
constexpr int64_t MAX_CHUNKS = 256;     // of rows in a backward

template <typename T>
constexpr int WIDTH = sizeof(T) == 2 ? 8 : 4;  // channels of a piece

// Channels as they are stored, in registers.
template <typename T>
struct alignas(16) Piece {
  uint32_t word[WIDTH<T> * sizeof(T) / 4];

  __device__ __forceinline__ Real<T> operator[](int i) const {
    if constexpr (std::is_same_v<T, c10::BFloat16>) return from_bits(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xFFFF0000u);
    if constexpr (std::is_same_v<T, c10::Half>) return __half2float(__ushort_as_half(uint16_t(word[i / 2] >> (i % 2 * 16))));
    if constexpr (std::is_same_v<T, float>) return from_bits(word[i]);
    if constexpr (std::is_same_v<T, double>) return __hiloint2double(int(word[2 * i + 1]), int(word[2 * i]));
  }
};

template <typename T>
__device__ __forceinline__ Piece<T> rounded(const Real<T> (&x)[WIDTH<T>]) {
  Piece<T> piece;
#pragma unroll
  for (int i = 0; i < int(sizeof piece.word / 4); ++i) {
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      std::memcpy(&piece.word[i], &pair, 4);
    } else if constexpr (std::is_same_v<T, c10::Half>) {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      std::memcpy(&piece.word[i], &pair, 4);
    } else if constexpr (std::is_same_v<T, float>) {
      piece.word[i] = to_bits(x[i]);
    } else {
      piece.word[i] = uint32_t(i % 2 == 0 ? __double2loint(x[i / 2]) : __double2hiint(x[i / 2]));
    }
  }
  return piece;
}

// Channels first .. first + WIDTH - 1 of a row; zero past its end.
template <bool Vector, typename T>
__device__ __forceinline__ Piece<T> read(const T* row, int first, int channels) {
  if constexpr (Vector) {
    Piece<T> piece;
#pragma unroll
    for (int i = 0; i < int(sizeof piece / 16); ++i) {
      const uint4 words = __ldg(reinterpret_cast<const uint4*>(row + first) + i);
      std::memcpy(piece.word + 4 * i, &words, 16);
    }
    return piece;
  } else {
    Real<T> x[WIDTH<T>];
#pragma unroll
    for (int i = 0; i < WIDTH<T>; ++i) x[i] = first + i < channels ? Real<T>(row[first + i]) : Real<T>(0);
    return rounded<T>(x);
  }
}

template <bool Vector, typename T>
__device__ __forceinline__ Piece<T> read_or_zero(const T* row, int first, int channels) {
  return row == nullptr ? Piece<T>{} : read<Vector>(row, first, channels);
}

template <bool Vector, typename T>
__device__ __forceinline__ void write(T* row, int first, int channels, const Piece<T>& piece) {
  if constexpr (Vector) {
    uint4* out = reinterpret_cast<uint4*>(row + first);
#pragma unroll
    for (int i = 0; i < int(sizeof piece / 16); ++i) {
      out[i] = make_uint4(piece.word[4 * i], piece.word[4 * i + 1], piece.word[4 * i + 2], piece.word[4 * i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < WIDTH<T>; ++i) {
      if (first + i < channels) row[first + i] = T(piece[i]);
    }
  }
}

// Calls body(first channel) for each of this thread's pieces of a row. Whole: the block's threads cover a row at once.
template <typename T, bool Whole, typename Body>
__device__ __forceinline__ void for_pieces(int channels, const Body& body) {
  if constexpr (Whole) {
    const int first = int(threadIdx.x) * WIDTH<T>;
    if (first < channels) body(first);
  } else {
#pragma unroll 1
    for (int first = int(threadIdx.x) * WIDTH<T>; first < channels; first += int(blockDim.x) * WIDTH<T>) body(first);
  }
}

template <typename T>
__device__ __forceinline__ NoiseRow noise_row(const Noise<T>& noise, int64_t row, Stream stream) {
  return NoiseRow(__ldg(noise.counters), __ldg(noise.counters + 1), __ldg(noise.positions + row), stream);
}

template <typename T>
__device__ __forceinline__ void fill_noise(const Noise<T>& noise, const NoiseRow& row, int first, Real<T> (&out)[WIDTH<T>]) {
#pragma unroll
  for (uint32_t group = 0; group < WIDTH<T> / 4; ++group) {
    const Normals normals = row.normals(uint32_t(first) / 4 + group);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[4 * group + i] = noise.sigma * Real<T>(normals.value[i]);
  }
}

// The tail's noise: none, one number a token, or one an element.
template <typename T>
__device__ __forceinline__ void fill_gate_noise(const Tail<T>& a, int64_t row, int first, Real<T> (&out)[WIDTH<T>]) {
  if (a.noise.positions != nullptr && !a.noise_per_token) return fill_noise(a.noise, noise_row(a.noise, row, GATE), first, out);
  Real<T> token = 0;
  if (a.noise.positions != nullptr) token = a.noise.sigma * Real<T>(noise_row(a.noise, row, GATE).normals(0).value[0]);
#pragma unroll
  for (int i = 0; i < WIDTH<T>; ++i) out[i] = token;
}

// N sums over the threads of a row (those with the same threadIdx.y), for each of them. All threads of the block call this.
// `scratch`: not touched by an earlier call since the block's last barrier but one.
template <int N, typename R>
__device__ __forceinline__ void sum_over_row(R (&sums)[N], R (&scratch)[N][MAX_THREADS / WARP]) {
  const unsigned lane = threadIdx.x % WARP, warps = blockDim.x / WARP, first_warp = threadIdx.y * warps;
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) sums[i] += __shfl_xor_sync(0xFFFFFFFFu, sums[i], step);
  }
  if (warps == 1) return;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) scratch[i][first_warp + threadIdx.x / WARP] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sums[i] = lane < warps ? scratch[i][first_warp + lane] : R(0);
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) sums[i] += __shfl_xor_sync(0xFFFFFFFFu, sums[i], step);
  }
}

// Adds up what the block's rows of threads (threadIdx.y) have for each channel, in order, and writes `channels` sums.
template <typename R, int N>
__device__ __forceinline__ void write_column_sums(const R (&sums)[N], R* scratch, R* out, int channels) {
  const int columns = int(blockDim.x) * N, thread = int(threadIdx.y * blockDim.x + threadIdx.x);
#pragma unroll
  for (int i = 0; i < N; ++i) scratch[thread * N + i] = sums[i];
  __syncthreads();
  for (int column = thread; column < min(columns, channels); column += int(blockDim.x * blockDim.y)) {
    R sum = 0;
    for (int y = 0; y < int(blockDim.y); ++y) sum += scratch[y * columns + column];
    out[column] = sum;
  }
}

template <typename T, bool Vector, bool Whole>
__global__ void __launch_bounds__(MAX_THREADS) head_kernel(const Head<T> a) {
  using R = Real<T>;
  __shared__ R mean_scratch[1][MAX_THREADS / WARP], square_scratch[1][MAX_THREADS / WARP], sums_scratch[2][MAX_THREADS / WARP];
  const int channels = int(a.channels);
  const int64_t row = blockIdx.x;
  const T* hidden_row = a.hidden + row * channels;
  Piece<T> held{};
  for_pieces<T, Whole>(channels, [&](int first) { held = read<Vector>(hidden_row, first, channels); });
  const auto hidden = [&](int first) { return Whole ? held : read<Vector>(hidden_row, first, channels); };

  if (a.noise.positions != nullptr) {
    const NoiseRow noise = noise_row(a.noise, row, STATE);
    for_pieces<T, Whole>(channels, [&](int first) {
      R normals[WIDTH<T>];
      fill_noise(a.noise, noise, first, normals);
      const Piece<T> piece = hidden(first);
#pragma unroll
      for (int i = 0; i < WIDTH<T>; ++i) normals[i] += piece[i];
      write<Vector>(a.noisy + row * channels, first, channels, rounded<T>(normals));
    });
  }

  const R inverse_channels = reciprocal(R(channels));
  R mean[1] = {0};
  if (!a.rms) {
    for_pieces<T, Whole>(channels, [&](int first) {
      const Piece<T> piece = hidden(first);
#pragma unroll
      for (int i = 0; i < WIDTH<T>; ++i) mean[0] += piece[i];
    });
    sum_over_row(mean, mean_scratch);
    mean[0] *= inverse_channels;
  }
  R square[1] = {0};
  for_pieces<T, Whole>(channels, [&](int first) {
    const Piece<T> piece = hidden(first);
#pragma unroll
    for (int i = 0; i < WIDTH<T>; ++i) {
      const R centred = piece[i] - mean[0];
      if (Vector || first + i < channels) square[0] += centred * centred;
    }
  });
  sum_over_row(square, square_scratch);
  const R rstd = rsqrt(square[0] * inverse_channels + a.eps);

  R sums[2] = {0, 0};  // of the normed state as it is stored: itself and its square
  for_pieces<T, Whole>(channels, [&](int first) {
    const Piece<T> piece = hidden(first), weight = read<Vector>(a.weight, first, channels);
    R unrounded[WIDTH<T>];
#pragma unroll
    for (int i = 0; i < WIDTH<T>; ++i) unrounded[i] = (piece[i] - mean[0]) * rstd * weight[i];
    const Piece<T> normed = rounded<T>(unrounded);
#pragma unroll
    for (int i = 0; i < WIDTH<T>; ++i) {
      sums[0] += normed[i];  // past the row's end the weight is zero
      sums[1] += normed[i] * normed[i];
    }
    write<Vector>(a.normed + row * channels, first, channels, normed);
  });
  sum_over_row(sums, sums_scratch);
  if (threadIdx.x == 0) {
    a.mean[row] = mean[0];
    a.rstd[row] = rstd;
    a.total[row] = sums[0];
    a.square[row] = sums[1];
  }
}

// Whole: threadIdx.y shares out the rows of the chunk, and weight gradients stay in registers. Otherwise blockDim.y is 1 and
// they are added up in memory.
template <typename T, bool Vector, bool Whole>
__global__ void __launch_bounds__(MAX_THREADS) head_backward_kernel(const HeadBackward<T> a) {
  using R = Real<T>;
  __shared__ R row_scratch[2][2][MAX_THREADS / WARP];
  const int channels = int(a.channels);
  const int64_t chunk = blockIdx.x, chunks = gridDim.x;
  R* grad_weight = a.grad_weight + chunk * channels;
  const R inverse_channels = reciprocal(R(channels));
  R weight_sums[WIDTH<T>] = {};

  for (int64_t first_row = chunk, turn = 0; first_row < a.rows; first_row += blockDim.y * chunks, ++turn) {
    const int64_t row = first_row + threadIdx.y * chunks, offset = row * channels;
    const bool active = row < a.rows;  // all threads of a block meet at its barriers
    const int row_channels = active ? channels : 0;
    const R mean = active ? a.mean[row] : R(0), rstd = active ? a.rstd[row] : R(0);
    const R grad_total = active && a.grad_total != nullptr ? a.grad_total[row] : R(0);
    const R grad_square = active && a.grad_square != nullptr ? R(2) * a.grad_square[row] : R(0);
    const T* hidden_row = a.hidden + offset;
    const T* normed_row = a.grad_normed == nullptr ? nullptr : a.grad_normed + offset;
    const T* noisy_row = a.grad_noisy == nullptr ? nullptr : a.grad_noisy + offset;

    // The gradient of the unweighted norm, that norm, and the gradient of the weighted one.
    struct Piecewise {
      R scaled[WIDTH<T>], unit[WIDTH<T>], grad[WIDTH<T>];
    };
    const auto gradients = [&](const Piece<T>& hidden, const Piece<T>& grad_normed, int first) {
      const Piece<T> weight = read<Vector>(a.weight, first, channels);
      Piecewise out;
#pragma unroll
      for (int i = 0; i < WIDTH<T>; ++i) {
        out.unit[i] = (hidden[i] - mean) * rstd;
        out.grad[i] = grad_normed[i] + grad_total + grad_square * out.unit[i] * weight[i];
        out.scaled[i] = out.grad[i] * weight[i];
      }
      return out;
    };

    Piece<T> hidden{}, grad_normed{}, grad_noisy{};
    R sums[2] = {0, 0};  // of the gradient of the unweighted norm: itself, and on that norm
    for_pieces<T, Whole>(row_channels, [&](int first) {
      hidden = read<Vector>(hidden_row, first, channels);
      grad_normed = read_or_zero<Vector>(normed_row, first, channels);
      if constexpr (Whole) grad_noisy = read_or_zero<Vector>(noisy_row, first, channels);
      const Piecewise piece = gradients(hidden, grad_normed, first);
#pragma unroll
      for (int i = 0; i < WIDTH<T>; ++i) {
        if (Vector || first + i < channels) {
          if constexpr (Whole) {
            weight_sums[i] += piece.grad[i] * piece.unit[i];
          } else {
            grad_weight[first + i] += piece.grad[i] * piece.unit[i];
          }
          sums[0] += piece.scaled[i];
          sums[1] += piece.scaled[i] * piece.unit[i];
        }
      }
    });
    sum_over_row(sums, row_scratch[turn % 2]);
    const R sum = a.rms ? R(0) : sums[0] * inverse_channels, projection = sums[1] * inverse_channels;

    for_pieces<T, Whole>(row_channels, [&](int first) {
      if constexpr (!Whole) {
        hidden = read<Vector>(hidden_row, first, channels);
        grad_normed = read_or_zero<Vector>(normed_row, first, channels);
        grad_noisy = read_or_zero<Vector>(noisy_row, first, channels);
      }
      const Piecewise piece = gradients(hidden, grad_normed, first);
      R grad_hidden[WIDTH<T>];
#pragma unroll
      for (int i = 0; i < WIDTH<T>; ++i) {
        grad_hidden[i] = rstd * (piece.scaled[i] - sum - piece.unit[i] * projection) + grad_noisy[i];
      }
      write<Vector>(a.grad_hidden + offset, first, channels, rounded<T>(grad_hidden));
    });
  }

  if constexpr (Whole) {
    __shared__ R column_scratch[MAX_THREADS * WIDTH<T>];
    write_column_sums(weight_sums, column_scratch, grad_weight, channels);
  }
}

template <typename T, bool Vector, bool Whole>
__global__ void __launch_bounds__(MAX_THREADS) tail_kernel(const Tail<T> a) {
  using R = Real<T>;
  __shared__ R scratch[1][MAX_THREADS / WARP];
  const int channels = int(a.channels);
  const int64_t row = blockIdx.x, offset = row * channels;
  R sum[1] = {0};
  for_pieces<T, Whole>(channels, [&](int first) {
    const Piece<T> logits = read<Vector>(a.logits + offset, first, channels), hidden = read<Vector>(a.hidden + offset, first, channels);
    const Piece<T> candidate = read<Vector>(a.candidate + offset, first, channels), bias = read<Vector>(a.bias, first, channels);
    R normals[WIDTH<T>];
    fill_gate_noise(a, row, first, normals);
    R updated[WIDTH<T>];
#pragma unroll
    for (int i = 0; i < WIDTH<T>; ++i) {
      const R g = gate(logits[i], bias[i] + a.initial_bias, a.inverse_temperature, normals[i]);
      updated[i] = blend(g, hidden[i], candidate[i]);
      if (Vector || first + i < channels) sum[0] += g;
    }
    write<Vector>(a.updated + offset, first, channels, rounded<T>(updated));
  });
  sum_over_row(sum, scratch);
  if (threadIdx.x == 0) a.gate_mean[row] = sum[0] * reciprocal(R(channels));
}

// A block has a tile of channels, one piece a lane, of one chunk of the rows, shared out to its warps.
template <typename T, bool Vector>
__global__ void __launch_bounds__(WARP* TILE_ROWS, Vector ? 4 : 2) tail_backward_kernel(const TailBackward<T> b) {
  using R = Real<T>;
  const Tail<T>& a = b.forward;
  __shared__ R scratch[WARP * TILE_ROWS * WIDTH<T>];
  const int channels = int(a.channels), tile = int(blockIdx.x) * WARP * WIDTH<T>, first = tile + int(threadIdx.x) * WIDTH<T>;
  const int64_t chunk = blockIdx.y, chunks = gridDim.y;
  R bias_sums[WIDTH<T>] = {};
  if (first < channels) {
    const Piece<T> bias = read<Vector>(a.bias, first, channels);
    for (int64_t row = chunk + threadIdx.y * chunks; row < a.rows; row += TILE_ROWS * chunks) {
      const int64_t offset = row * channels;
      const Piece<T> logits = read<Vector>(a.logits + offset, first, channels), hidden = read<Vector>(a.hidden + offset, first, channels);
      const Piece<T> candidate = read<Vector>(a.candidate + offset, first, channels);
      const Piece<T> grad = read<Vector>(b.grad_updated + offset, first, channels);
      R normals[WIDTH<T>];
      fill_gate_noise(a, row, first, normals);
      R grad_logits[WIDTH<T>], grad_hidden[WIDTH<T>], grad_candidate[WIDTH<T>];
#pragma unroll
      for (int i = 0; i < WIDTH<T>; ++i) {
        const R g = gate(logits[i], bias[i] + a.initial_bias, a.inverse_temperature, normals[i]);
        const auto back = blend_backward(grad[i], g, hidden[i], candidate[i], a.inverse_temperature);
        bias_sums[i] += back.logit;
        grad_logits[i] = back.logit;
        grad_hidden[i] = back.hidden;
        grad_candidate[i] = back.candidate;
      }
      write<Vector>(b.grad_logits + offset, first, channels, rounded<T>(grad_logits));
      write<Vector>(b.grad_hidden + offset, first, channels, rounded<T>(grad_hidden));
      write<Vector>(b.grad_candidate + offset, first, channels, rounded<T>(grad_candidate));
    }
  }
  write_column_sums(bias_sums, scratch, b.grad_bias + chunk * channels + tile, channels - tile);
}

__global__ void philox_kernel(const int64_t* counters, int64_t seed, int64_t count, int64_t* words) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64_t* counter = counters + 4 * i;
  const Words made = philox4x32({{uint32_t(counter[0]), uint32_t(counter[1]), uint32_t(counter[2]), uint32_t(counter[3])}}, uint32_t(seed),
                                uint32_t(uint64_t(seed) >> 32));
  for (int word = 0; word < 4; ++word) words[4 * i + word] = made.word[word];
}

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename T>
int row_threads(int64_t channels) {
  return int(std::min<int64_t>(MAX_THREADS, ceil_divide(channels, WARP * WIDTH<T>) * WARP));
}

// Whether pieces can be read and written whole. double, for gradient checks, has no such kernels.
template <typename T, typename... Pointers>
bool vectors_fit(int64_t channels, Pointers... pointers) {
  return sizeof(T) < sizeof(double) && channels % WIDTH<T> == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

template <typename T>
bool row_fits_block(int64_t channels) {
  return channels <= MAX_THREADS * WIDTH<T>;
}

void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("grt: the CUDA kernel of ") + kernel +
                           " did not start, or an earlier kernel failed: " + cudaGetErrorString(error) +
                           ". If it has no image for this GPU, run `python -m model.ops.build` on this machine.");
}

}  // namespace

namespace cuda {

int64_t partial_rows(int64_t rows) { return std::clamp<int64_t>(rows / 16, 1, MAX_CHUNKS); }

template <typename T>
void launch(const Head<T>& a, cudaStream_t stream) {
  if (a.rows == 0) return;
  const dim3 grid(static_cast<unsigned>(a.rows)), block(row_threads<T>(a.channels));
  const bool vector = vectors_fit<T>(a.channels, a.hidden, a.weight, a.normed, a.noisy);
  if constexpr (sizeof(T) < sizeof(double)) {
    if (vector && row_fits_block<T>(a.channels)) {
      head_kernel<T, true, true><<<grid, block, 0, stream>>>(a);
    } else if (vector) {
      head_kernel<T, true, false><<<grid, block, 0, stream>>>(a);
    }
  }
  if (!vector) head_kernel<T, false, false><<<grid, block, 0, stream>>>(a);
  check_launch("gate_head");
}

template <typename T>
void launch(const HeadBackward<T>& a, cudaStream_t stream) {
  if (a.rows == 0) return;
  const int threads = row_threads<T>(a.channels);
  const dim3 grid(static_cast<unsigned>(partial_rows(a.rows)));
  const bool vector = vectors_fit<T>(a.channels, a.grad_normed, a.grad_noisy, a.hidden, a.weight, a.grad_hidden);
  if constexpr (sizeof(T) < sizeof(double)) {
    if (vector && row_fits_block<T>(a.channels)) {
      head_backward_kernel<T, true, true><<<grid, dim3(threads, MAX_THREADS / threads), 0, stream>>>(a);
    } else if (vector) {
      head_backward_kernel<T, true, false><<<grid, threads, 0, stream>>>(a);
    }
  }
  if (!vector) head_backward_kernel<T, false, false><<<grid, threads, 0, stream>>>(a);
  check_launch("gate_head_backward");
}

template <typename T>
void launch(const Tail<T>& a, cudaStream_t stream) {
  if (a.rows == 0) return;
  const dim3 grid(static_cast<unsigned>(a.rows)), block(row_threads<T>(a.channels));
  const bool vector = vectors_fit<T>(a.channels, a.logits, a.bias, a.hidden, a.candidate, a.updated);
  if constexpr (sizeof(T) < sizeof(double)) {
    if (vector && row_fits_block<T>(a.channels)) {
      tail_kernel<T, true, true><<<grid, block, 0, stream>>>(a);
    } else if (vector) {
      tail_kernel<T, true, false><<<grid, block, 0, stream>>>(a);
    }
  }
  if (!vector) tail_kernel<T, false, false><<<grid, block, 0, stream>>>(a);
  check_launch("gate_tail");
}

template <typename T>
void launch(const TailBackward<T>& b, cudaStream_t stream) {
  const Tail<T>& a = b.forward;
  if (a.rows == 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_divide(a.channels, WARP * WIDTH<T>)), static_cast<unsigned>(partial_rows(a.rows)));
  const dim3 block(WARP, TILE_ROWS);
  const bool vector =
      vectors_fit<T>(a.channels, a.logits, a.bias, a.hidden, a.candidate, b.grad_updated, b.grad_logits, b.grad_hidden, b.grad_candidate);
  if constexpr (sizeof(T) < sizeof(double)) {
    if (vector) tail_backward_kernel<T, true><<<grid, block, 0, stream>>>(b);
  }
  if (!vector) tail_backward_kernel<T, false><<<grid, block, 0, stream>>>(b);
  check_launch("gate_tail_backward");
}

void philox(const int64_t* counters, int64_t seed, int64_t count, int64_t* words, cudaStream_t stream) {
  if (count == 0) return;
  philox_kernel<<<static_cast<unsigned>(ceil_divide(count, 256)), 256, 0, stream>>>(counters, seed, count, words);
  check_launch("philox");
}

#define GRT_INSTANTIATE(T)                                    \
  template void launch(const Head<T>&, cudaStream_t);         \
  template void launch(const HeadBackward<T>&, cudaStream_t); \
  template void launch(const Tail<T>&, cudaStream_t);         \
  template void launch(const TailBackward<T>&, cudaStream_t);
GRT_INSTANTIATE(double)
GRT_INSTANTIATE(float)
GRT_INSTANTIATE(c10::BFloat16)
GRT_INSTANTIATE(c10::Half)
#undef GRT_INSTANTIATE

}  // namespace cuda
}  // namespace grt
