// Runs the CUDA kernels of the gate operators on a CPU, where there is no GPU to try them on: the launches of gate_cuda.cu behind
// the names of gate_cpu.cpp's, so that gate_ops.cpp is linked with them unchanged.
//
// Each thread of a block is a fiber; barriers and shuffles switch between them. Each warp goes as far as barriers let it, in an order
// drawn anew each time, so that a missing one shows. A barrier that some thread never reaches and a vector access that is not aligned
// end the program. The test rewrites what is not C++ (launches, __shared__) into kernels.inc.
#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace host {

constexpr int LANES = 32, MOST_THREADS = 1024;
constexpr size_t STACK = 64 << 10;

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  uint3 index;
  int number;
  long barriers, shuffles;  // reached so far
  bool finished;
};

std::vector<Thread> threads;  // of the block that runs
ucontext_t scheduler;
Thread* current;
dim3 grid_size, block_size;
uint3 block_index;
void (*kernel)(const void*);
const void* kernel_arguments;
double shuffled[2][MOST_THREADS];
long arrivals, warp_arrivals[MOST_THREADS / LANES], finished;  // of the block's threads at barriers, of warps' at shuffles; that ended
cudaError_t error = cudaSuccess;
std::mt19937 random_order;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "cuda_on_host: %s\n", what);
  std::abort();
}

void let_others_run() { swapcontext(&current->context, &scheduler); }

// Until so many have arrived. None is a whole step ahead of another, so that the sum tells.
void wait_for(long expected, const long& arrived) {
  while (arrived < expected) let_others_run();
}

void run_thread() {
  kernel(kernel_arguments);
  current->finished = true;
  ++finished;
  let_others_run();
}

long progress() { return std::accumulate(std::begin(warp_arrivals), std::end(warp_arrivals), arrivals + finished); }

void run_warp(int warp) {
  std::array<int, LANES> order;
  std::iota(order.begin(), order.end(), warp * LANES);
  std::shuffle(order.begin(), order.end(), random_order);
  for (int number : order) {
    current = &threads[number];
    if (!current->finished) swapcontext(&scheduler, &current->context);
  }
}

void run_block() {
  std::vector<int> warps(threads.size() / LANES);
  std::iota(warps.begin(), warps.end(), 0);
  arrivals = finished = 0;
  std::fill(std::begin(warp_arrivals), std::end(warp_arrivals), 0);
  for (int i = 0; i < int(threads.size()); ++i) {
    Thread& thread = threads[i];
    thread.index = {i % block_size.x, i / block_size.x, 0};
    thread.number = i;
    thread.barriers = thread.shuffles = 0;
    thread.finished = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    makecontext(&thread.context, run_thread, 0);
  }
  // One warp after another goes as far as it can, so that warps are as far apart as barriers allow.
  while (finished < long(threads.size())) {
    const long before_all = progress();
    std::shuffle(warps.begin(), warps.end(), random_order);
    for (int warp : warps) {
      for (long before = -1; before != progress();) {
        before = progress();
        run_warp(warp);
      }
    }
    if (progress() == before_all) fail("threads wait for others that never come");
  }
}

template <typename Kernel, typename... Arguments>
void launch(Kernel function, dim3 grid, dim3 block, const Arguments&... arguments) {
  const unsigned count = block.x * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.y > 65535 || count == 0 || count % LANES != 0 || count > MOST_THREADS) {
    error = cudaErrorInvalidConfiguration;
    return;
  }
  const auto call = [&] { function(arguments...); };
  kernel = [](const void* stored) { (*static_cast<const decltype(call)*>(stored))(); };
  kernel_arguments = &call;
  grid_size = grid;
  block_size = block;
  threads.resize(count);
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      block_index = {x, y, 0};
      run_block();
    }
  }
}

}  // namespace host

#define threadIdx (host::current->index)
#define blockIdx (host::block_index)
#define blockDim (host::block_size)
#define gridDim (host::grid_size)
#define __launch_bounds__(...)

void __syncthreads() {
  const long mine = ++host::current->barriers;
  ++host::arrivals;
  host::wait_for(mine * long(host::threads.size()), host::arrivals);
}

template <typename R>
R __shfl_xor_sync(unsigned mask, R value, int step) {
  if (mask != 0xFFFFFFFFu) host::fail("a shuffle of part of a warp");
  const host::Thread& me = *host::current;
  const long mine = ++host::current->shuffles;
  host::shuffled[mine % 2][me.number] = double(value);
  long& arrived = host::warp_arrivals[me.number / host::LANES];
  ++arrived;
  host::wait_for(mine * host::LANES, arrived);
  return R(host::shuffled[mine % 2][me.number ^ step]);
}

template <typename V>
V __ldg(const V* at) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(V) != 0) host::fail("an access that is not aligned");
  return *at;
}

uint64_t bits_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
int __double2hiint(double x) { return int(bits_of(x) >> 32); }
int __double2loint(double x) { return int(bits_of(x)); }
double __hiloint2double(int high, int low) {
  const uint64_t bits = uint64_t{uint32_t(high)} << 32 | uint32_t(low);
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
float rsqrt(float x) { return 1.0f / std::sqrt(x); }
double rsqrt(double x) { return 1.0 / std::sqrt(x); }
using std::min;

// CUDA's runtime is not linked.
extern "C" cudaError_t cudaGetLastError() { return std::exchange(host::error, cudaSuccess); }
extern "C" const char* cudaGetErrorString(cudaError_t) { return "no such block or grid"; }

#include "kernels.inc"

namespace grt::cpu {

int64_t partial_rows(int64_t rows) { return cuda::partial_rows(rows); }

#define GRT_ON_HOST(ARGUMENTS)                           \
  template <typename T>                                  \
  void launch(const ARGUMENTS<T>& arguments) {           \
    cuda::launch(arguments, nullptr);                    \
  }                                                      \
  template void launch(const ARGUMENTS<double>&);        \
  template void launch(const ARGUMENTS<float>&);         \
  template void launch(const ARGUMENTS<c10::BFloat16>&); \
  template void launch(const ARGUMENTS<c10::Half>&);
GRT_ON_HOST(Head)
GRT_ON_HOST(HeadBackward)
GRT_ON_HOST(Tail)
GRT_ON_HOST(TailBackward)

}  // namespace grt::cpu

extern "C" void philox_on_host(const int64_t* counters, int64_t seed, int64_t count, int64_t* words) {
  grt::cuda::philox(counters, seed, count, words, nullptr);
}
