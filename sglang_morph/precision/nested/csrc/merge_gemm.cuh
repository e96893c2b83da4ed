// y[M, N] = x[M, K] * W[N, K]^T, where W is rebuilt from its nested halves on the way.
//
// A block works on tiles of 128 rows of W by `kTokens` rows of x, 64 columns of K a step. Producer
// warps copy the halves and x to shared memory ahead of time and write the merged weights there, in
// the order that wgmma wants; two consumer warpgroups multiply. So the halves are read from memory
// once per tile as they are, row-major, 16 bytes a thread, and the same upper halves serve an FP8
// GEMM.
//
// Steps of all tiles are dealt out evenly, as one range a block ("stream-K"). A block that ends
// inside a tile leaves its sum to the tile's owner: the block that has the tile's first step adds
// the others' in a fixed order, so results do not depend on timing.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>

#include "wgmma.cuh"

namespace sglang_morph {

constexpr int kRows = 128;
constexpr int kDepth = 64;
constexpr int kChunk = 16;               // bytes of one copy
constexpr int kHalfBytes = kRows * kDepth;        // one half of a tile's step
constexpr int kWeightBytes = 2 * kHalfBytes;      // merged
constexpr int kConsumers = 256;
constexpr int kStagedTokens = 32;        // of the result, on its way out
constexpr int kStagedPitch = 64 * 2 + 16;  // bytes; the padding keeps banks apart

// How many steps are copied ahead, and how many merged ones wait, by the size of a tile of x.
template <int kTokens>
struct Stages {
  static constexpr int kAhead = kTokens <= 32 ? 6 : kTokens <= 64 ? 4 : kTokens <= 128 ? 3 : 2;
  static constexpr int kMerged = kTokens <= 128 ? 3 : 2;
  static constexpr int kProducers = kTokens <= 128 ? 256 : 128;
};

template <int kTokens>
struct Shared {
  using S = Stages<kTokens>;
  static constexpr int kInputBytes = kTokens * kDepth * 2;
  static constexpr int kInputSlots = S::kAhead + S::kMerged;
  static constexpr int kHalvesSlots = S::kAhead + 1;
  static constexpr int kMergedAt = 0;
  static constexpr int kInputAt = kMergedAt + S::kMerged * kWeightBytes;
  static constexpr int kHalvesAt = kInputAt + kInputSlots * kInputBytes;
  static constexpr int kStagingAt = kHalvesAt + kHalvesSlots * 2 * kHalfBytes;
  static constexpr int kStagingBytes = 2 * kStagedTokens * kStagedPitch;
  static constexpr int kBarriersAt = kStagingAt + kStagingBytes;
  static constexpr int kBytes = kBarriersAt + 2 * S::kMerged * 8;
};

// Barriers and copies

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Zeros where not `inside`; the address is not read then.
__device__ __forceinline__ void copy_chunk(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(inside ? kChunk : 0)
               : "memory");
}

__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Merging

__device__ __forceinline__ uint32_t packed(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t packed(float low, float high, __half) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&pair);
}

// Two fp16 weights in the type that is multiplied. Exact: bf16 weights that fp16 cannot hold are
// not what the halves stand for.
__device__ __forceinline__ uint32_t as_operand(uint32_t pair, __half) { return pair; }

__device__ __forceinline__ uint32_t as_operand(uint32_t pair, __nv_bfloat16 type) {
  float2 values = __half22float2(*reinterpret_cast<__half2*>(&pair));
  return packed(values.x, values.y, type);
}

// Four weights of four upper and four lower bytes. No byte borrows from the next: an upper byte is
// at least bit 7 of its lower byte.
template <typename T, bool kE5M2>
__device__ __forceinline__ uint2 merge_four(uint32_t upper, uint32_t lower) {
  uint32_t high = upper - ((lower >> 7) & 0x01010101u);
  if constexpr (!kE5M2) {
    high = ((high >> 1) & 0x3F3F3F3Fu) | (upper & 0x80808080u);
  }
  return {as_operand(__byte_perm(lower, high, 0x5140), T()),
          as_operand(__byte_perm(lower, high, 0x7362), T())};
}

struct Problem {
  const uint8_t* upper;  // [n, k]
  const uint8_t* lower;
  const void* x;  // [m, k], rows `x_stride` elements apart
  void* y;        // [m, n]
  float* partials;  // one tile a block
  int* ready;       // one a block, 0 between launches
  int64_t x_stride;
  int m, n, k;
};

// Where a block is in its range of steps.
struct Cursor {
  int tile, step;

  __device__ Cursor(int64_t position, int steps)
      : tile(static_cast<int>(position / steps)), step(static_cast<int>(position % steps)) {}

  // True where the next step belongs to another tile.
  __device__ bool advance(int steps) {
    if (++step < steps) return false;
    step = 0;
    ++tile;
    return true;
  }
};

struct Range {
  int64_t begin, end;

  __device__ Range(int64_t total, int block, int blocks)
      : begin(total * block / blocks), end(total * (block + 1) / blocks) {}
};

// Copies a step's halves and rows of x to shared memory.
template <typename T, int kTokens>
class Copier {
  static constexpr int kThreads = Stages<kTokens>::kProducers;
  static constexpr int kHalfCopies = kHalfBytes / kChunk / kThreads;
  static constexpr int kInputChunks = kTokens * kDepth * 2 / kChunk;
  static constexpr int kInputCopies = (kInputChunks + kThreads - 1) / kThreads;
  static constexpr int kHalfStride = kThreads / 4;   // rows between a thread's chunks
  static constexpr int kInputStride = kThreads / 8;

 public:
  __device__ Copier(const Problem& problem, int token_tiles, uint32_t halves, uint32_t input,
                    int thread)
      : p_(problem), token_tiles_(token_tiles), halves_(halves + thread * kChunk), thread_(thread) {
    int row = thread / 8, chunk = thread % 8;
    input_ = input + row * 128 + ((chunk ^ (row & 7)) * kChunk);
  }

  __device__ void start_tile(int tile) {
    row_ = tile / token_tiles_ * kRows + thread_ / 4;
    half_at_ = static_cast<int64_t>(row_) * p_.k + thread_ % 4 * kChunk;
    token_ = tile % token_tiles_ * kTokens + thread_ / 8;
    input_from_ = static_cast<const T*>(p_.x) + token_ * p_.x_stride + thread_ % 8 * 8;
  }

  __device__ void copy(int step, int halves_slot, int input_slot) const {
    uint32_t to = halves_ + halves_slot * 2 * kHalfBytes;
    int64_t at = half_at_ + step * kDepth;
#pragma unroll
    for (int i = 0; i < kHalfCopies; ++i) {
      bool inside = row_ + i * kHalfStride < p_.n;
      int64_t from = inside ? at + static_cast<int64_t>(i) * kHalfStride * p_.k : 0;
      copy_chunk(to + i * kThreads * kChunk, p_.upper + from, inside);
      copy_chunk(to + kHalfBytes + i * kThreads * kChunk, p_.lower + from, inside);
    }
    to = input_ + input_slot * Shared<kTokens>::kInputBytes;
    const T* from = input_from_ + step * kDepth;
#pragma unroll
    for (int i = 0; i < kInputCopies; ++i) {
      if (kInputChunks % kThreads == 0 || thread_ + i * kThreads < kInputChunks) {
        bool inside = token_ + i * kInputStride < p_.m;
        copy_chunk(to + i * kInputStride * 128,
                   inside ? from + i * kInputStride * p_.x_stride : p_.x, inside);
      }
    }
  }

 private:
  const Problem& p_;
  int token_tiles_;
  uint32_t halves_, input_;
  int thread_;
  int row_ = 0, token_ = 0;
  int64_t half_at_ = 0;
  const T* input_from_ = nullptr;
};

// Merges the chunks that this very thread has copied, so it need not wait for others.
template <typename T, bool kE5M2, int kTokens>
__device__ __forceinline__ void merge_step(uint32_t halves, uint32_t merged, int thread) {
  constexpr int kThreads = Stages<kTokens>::kProducers;
#pragma unroll
  for (int i = 0; i < kHalfBytes / kChunk / kThreads; ++i) {
    int number = i * kThreads + thread;
    uint4 upper = load_shared(halves + number * kChunk);
    uint4 lower = load_shared(halves + kHalfBytes + number * kChunk);
    uint2 a = merge_four<T, kE5M2>(upper.x, lower.x), b = merge_four<T, kE5M2>(upper.y, lower.y);
    uint2 c = merge_four<T, kE5M2>(upper.z, lower.z), d = merge_four<T, kE5M2>(upper.w, lower.w);
    int row = number / 4, chunk = number % 4 * 2;
    uint32_t to = merged + row * 128;
    store_shared(to + (chunk ^ (row & 7)) * kChunk, {a.x, a.y, b.x, b.y});
    store_shared(to + ((chunk + 1) ^ (row & 7)) * kChunk, {c.x, c.y, d.x, d.y});
  }
}

template <int kSize>
__device__ __forceinline__ int next_slot(int slot) {
  return slot + 1 == kSize ? 0 : slot + 1;
}

template <typename T, bool kE5M2, int kTokens>
__device__ __forceinline__ void produce(const Problem& p, Range range, int steps, int token_tiles, uint32_t shared,
                        uint32_t full, uint32_t empty, int thread) {
  using L = Shared<kTokens>;
  constexpr int kAhead = Stages<kTokens>::kAhead, kMerged = Stages<kTokens>::kMerged;
  Copier<T, kTokens> copier(p, token_tiles, shared + L::kHalvesAt, shared + L::kInputAt, thread);
  Cursor ahead(range.begin, steps);
  const int count = static_cast<int>(range.end - range.begin);
  int halves_slot = 0, input_slot = 0;
  copier.start_tile(ahead.tile);
  auto copy_next = [&](int number) {
    if (number < count) {
      copier.copy(ahead.step, halves_slot, input_slot);
      if (ahead.advance(steps)) copier.start_tile(ahead.tile);
    }
    copy_commit();
    halves_slot = next_slot<L::kHalvesSlots>(halves_slot);
    input_slot = next_slot<L::kInputSlots>(input_slot);
  };
  for (int i = 0; i < kAhead; ++i) copy_next(i);
  int merged_slot = 0, from_slot = 0;
  uint32_t parity = 1;  // the first round finds the slots empty
  for (int i = 0; i < count; ++i) {
    // Frees a slot of merged weights, and of x the one that was used as many steps ago.
    barrier_wait(empty + merged_slot * 8, parity);
    copy_next(i + kAhead);
    copy_wait<kAhead>();
    merge_step<T, kE5M2, kTokens>(shared + L::kHalvesAt + from_slot * 2 * kHalfBytes,
                                  shared + L::kMergedAt + merged_slot * kWeightBytes, thread);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_arrive(full + merged_slot * 8);
    from_slot = next_slot<L::kHalvesSlots>(from_slot);
    merged_slot = next_slot<kMerged>(merged_slot);
    if (merged_slot == 0) parity ^= 1;
  }
  copy_wait<0>();
}

// Sums of a tile that other blocks hold

__device__ __forceinline__ void publish(int* flag) {
  asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}

__device__ __forceinline__ void await(const int* flag) {
  int value;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  } while (value == 0);
}

template <int kValues>
__device__ __forceinline__ void leave_partial(const Problem& p, int block, int thread, const float (&sum)[kValues]) {
  float* to = p.partials + static_cast<int64_t>(block) * kConsumers * kValues + thread;
#pragma unroll
  for (int i = 0; i < kValues; ++i) __stcg(to + i * kConsumers, sum[i]);
  __threadfence();
  named_barrier(1, kConsumers);
  if (thread == 0) publish(p.ready + block);
}

template <int kValues>
__device__ __forceinline__ void add_partial(const Problem& p, int block, int thread, float (&sum)[kValues]) {
  await(p.ready + block);
  const float* from = p.partials + static_cast<int64_t>(block) * kConsumers * kValues + thread;
#pragma unroll
  for (int i = 0; i < kValues; ++i) sum[i] += __ldcg(from + i * kConsumers);
  named_barrier(1, kConsumers);
  if (thread == 0) p.ready[block] = 0;
}

// Writes one warpgroup's [64, kTokens] of a tile, transposed through shared memory.
template <typename T, int kTokens>
__device__ __forceinline__ void write_tile(const Problem& p, int row, int token, uint32_t staging, int group,
                           int thread, const float (&sum)[kTokens / 2]) {
  constexpr int kPart = kTokens < kStagedTokens ? kTokens : kStagedTokens;
  const int lane = thread % 32, warp = thread / 32;
  // Lane l addresses row l % 8 of matrix l / 8: tokens of an 8-by-8 block, stored transposed.
  uint32_t matrix = staging + (lane / 16 * 8 + lane % 8) * kStagedPitch +
                    (warp * 16 + lane / 8 % 2 * 8) * 2;
#pragma unroll
  for (int part = 0; part < kTokens / kPart; ++part) {
    named_barrier(2 + group, 128);  // the last part has been read
#pragma unroll
    for (int j = 0; j < kPart / 16; ++j) {
      const float* d = &sum[(part * kPart / 8 + 2 * j) * 4];
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
              matrix + j * 16 * kStagedPitch),
          "r"(packed(d[0], d[1], T())), "r"(packed(d[2], d[3], T())),
          "r"(packed(d[4], d[5], T())), "r"(packed(d[6], d[7], T()))
          : "memory");
    }
    named_barrier(2 + group, 128);
    const int column = row + thread % 8 * 8;
#pragma unroll
    for (int r = thread / 8; r < kPart; r += 16) {
      int to = token + part * kPart + r;
      if (to < p.m && column < p.n) {
        uint4 v = load_shared(staging + r * kStagedPitch + thread % 8 * kChunk);
        *reinterpret_cast<uint4*>(static_cast<T*>(p.y) + static_cast<int64_t>(to) * p.n + column) =
            v;
      }
    }
  }
}

template <typename T, int kTokens>
__device__ __forceinline__ void consume(const Problem& p, Range range, int64_t total, int block,
                                        int blocks, int steps, int token_tiles, uint32_t shared,
                                        uint32_t full, uint32_t empty, int group, int thread) {
  using L = Shared<kTokens>;
  constexpr int kMerged = Stages<kTokens>::kMerged;
  const int lane = thread % 32;
  const uint32_t weights_at = shared + L::kMergedAt + group * (kWeightBytes / 2);
  float sum[kTokens / 2];
  int merged_slot = 0, input_slot = 0;
  uint32_t parity = 0;
  auto multiply = [&](bool add) {
    barrier_wait(full + merged_slot * 8, parity);
    const uint64_t weights = tile_descriptor(weights_at + merged_slot * kWeightBytes);
    const uint64_t input = tile_descriptor(shared + L::kInputAt + input_slot * L::kInputBytes);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kDepth / 16; ++part) {
      // 16 elements of K are 32 bytes, 2 in a descriptor.
      Wgmma<T, kTokens>::multiply(sum, weights + 2 * part, input + 2 * part, part > 0 || add);
    }
    wgmma_commit();
    const uint32_t slot = empty + merged_slot * 8;
    input_slot = next_slot<L::kInputSlots>(input_slot);
    merged_slot = next_slot<kMerged>(merged_slot);
    parity ^= merged_slot == 0;
    return slot;
  };
  for (int64_t position = range.begin; position < range.end;) {
    const int tile = static_cast<int>(position / steps);
    const int first = static_cast<int>(position % steps);
    const int64_t tile_end = static_cast<int64_t>(tile + 1) * steps;
    const int count = static_cast<int>(min(tile_end, range.end) - position);
    uint32_t in_use = multiply(false);
    for (int i = 1; i < count; ++i) {
      const uint32_t next = multiply(true);
      wgmma_wait<1>();
      if (lane == 0) barrier_arrive(in_use);
      in_use = next;
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(in_use);
    if (first > 0) {
      leave_partial(p, block, thread, sum);
    } else {
      for (int other = block + 1; Range(total, other - 1, blocks).end < tile_end; ++other) {
        add_partial(p, other, thread, sum);
      }
      write_tile<T, kTokens>(p, tile / token_tiles * kRows + group * 64,
                             tile % token_tiles * kTokens,
                             shared + L::kStagingAt + group * (L::kStagingBytes / 2), group,
                             thread % 128, sum);
    }
    position += count;
  }
}

template <typename T, bool kE5M2, int kTokens>
__global__ void __launch_bounds__(Stages<kTokens>::kProducers + kConsumers, 1)
    merge_gemm_kernel(const __grid_constant__ Problem p) {
  using L = Shared<kTokens>;
  constexpr int kProducers = Stages<kTokens>::kProducers, kMerged = Stages<kTokens>::kMerged;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  const uint32_t full = shared + L::kBarriersAt, empty = full + kMerged * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMerged; ++i) {
      barrier_init(full + i * 8, kProducers);
      barrier_init(empty + i * 8, kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // Blocks start in order; so one that waits for another's sum waits for one that started before.
  const int blocks = gridDim.x, block = blocks - 1 - blockIdx.x;
  const int steps = p.k / kDepth, token_tiles = (p.m + kTokens - 1) / kTokens;
  const int64_t total = static_cast<int64_t>((p.n + kRows - 1) / kRows) * token_tiles * steps;
  const Range range(total, block, blocks);
  const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);  // the same in a whole warp
  if (group < kConsumers / 128) {
    consume<T, kTokens>(p, range, total, block, blocks, steps, token_tiles, shared, full, empty,
                        group, threadIdx.x);
  } else {
    produce<T, kE5M2, kTokens>(p, range, steps, token_tiles, shared, full, empty,
                               threadIdx.x - kConsumers);
  }
}

template <typename T, bool kE5M2, int kTokens>
void launch(const Problem& p, int blocks, cudaStream_t stream) {
  constexpr int kBytes = Shared<kTokens>::kBytes;
  static_assert(kBytes <= 232448, "more shared memory than a block can have");
  auto kernel = merge_gemm_kernel<T, kE5M2, kTokens>;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  TVM_FFI_ICHECK_EQ(allowed, cudaSuccess) << cudaGetErrorString(allowed);
  const int64_t steps = static_cast<int64_t>((p.n + kRows - 1) / kRows) *
                        ((p.m + kTokens - 1) / kTokens) * (p.k / kDepth);
  const int grid = static_cast<int>(std::min<int64_t>(blocks, steps));
  kernel<<<grid, Stages<kTokens>::kProducers + kConsumers, kBytes, stream>>>(p);
  const cudaError_t error = cudaGetLastError();
  TVM_FFI_ICHECK_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

// upper, lower: uint8 [N, K]; x: T [M, K]; y: T [M, N]; partials: float32, a tile of 128 by 256 for
// every entry of ready: int32 zeros, one for every multiprocessor. K is a multiple of 64, N of 8;
// M is not 0. Checked by the caller.
template <typename T, bool kE5M2>
void merge_gemm(tvm::ffi::TensorView upper, tvm::ffi::TensorView lower, tvm::ffi::TensorView x,
                tvm::ffi::TensorView y, tvm::ffi::TensorView partials, tvm::ffi::TensorView ready) {
  Problem p;
  p.upper = static_cast<const uint8_t*>(upper.data_ptr());
  p.lower = static_cast<const uint8_t*>(lower.data_ptr());
  p.x = x.data_ptr();
  p.y = y.data_ptr();
  p.partials = static_cast<float*>(partials.data_ptr());
  p.ready = static_cast<int*>(ready.data_ptr());
  p.x_stride = x.stride(0);
  p.m = static_cast<int>(x.size(0));
  p.n = static_cast<int>(upper.size(0));
  p.k = static_cast<int>(upper.size(1));
  const int blocks = static_cast<int>(ready.size(0));
  const auto device = x.device();
  const auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  if (p.m <= 16) {
    launch<T, kE5M2, 16>(p, blocks, stream);
  } else if (p.m <= 32) {
    launch<T, kE5M2, 32>(p, blocks, stream);
  } else if (p.m <= 64) {
    launch<T, kE5M2, 64>(p, blocks, stream);
  } else if (p.m <= 128) {
    launch<T, kE5M2, 128>(p, blocks, stream);
  } else {
    launch<T, kE5M2, 256>(p, blocks, stream);
  }
}

}  // namespace sglang_morph
