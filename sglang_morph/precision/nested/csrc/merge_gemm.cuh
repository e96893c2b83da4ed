// y[M, N] = x[M, K] * W[N, K]^T, where W is rebuilt from its nested halves on the way.
//
// A block works on tiles of 128 rows of W by `kTokens` rows of x, 64 columns of K a step. One thread
// has the copy engine bring the halves and x to shared memory ahead of time. Two warpgroups take
// fragments of both halves from there, merge them in registers, and multiply: W is wgmma's first
// operand, which may be registers, so merged weights never go through memory. While the tensor cores
// work on a step, the next one is merged.
//
// So the halves are read from memory as they are, row-major, and the same upper halves serve an FP8
// GEMM.
//
// Steps of all tiles are dealt out evenly, as one range a block ("stream-K"). A block that ends
// inside a tile leaves its sum to the tile's owner: the block that has the tile's first step adds
// the others' in a fixed order, so results do not depend on timing.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>

#include "wgmma.cuh"

namespace sglang_morph {

constexpr int kRows = 128;  // of W in a tile
constexpr int kDepth = 64;  // columns of K in a step
constexpr int kHalfBytes = kRows * kDepth;  // one half of a tile's step
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 128;  // one of the last copies; wgmma counts in warpgroups
constexpr int kStagedTokens = 32;           // of the result, on its way out
constexpr int kStagedPitch = 64 * 2 + 16;   // bytes; the padding keeps banks apart

// Small tiles leave room for two blocks on a multiprocessor: one merges while the other waits.
template <int kTokens>
constexpr int kBlocks = kTokens <= 64 ? 2 : 1;
constexpr int kMostBlocks = 2;
constexpr int kSharedBytes = 232448;  // of a multiprocessor, for blocks to use
constexpr int kBlockOverhead = 1024;

template <int kTokens>
struct Shared {
  static constexpr int kInputBytes = kTokens * kDepth * 2;
  static constexpr int kSlotBytes = kInputBytes + 2 * kHalfBytes;
  static constexpr int kStagingBytes = 2 * kStagedTokens * kStagedPitch;
  static constexpr int kRoom = kSharedBytes / kBlocks<kTokens> - kBlockOverhead;
  static constexpr int kSlots = (kRoom - kStagingBytes - 256) / kSlotBytes;  // all that fit
  static constexpr int kStagingAt = kSlots * kSlotBytes;
  static constexpr int kBarriersAt = kStagingAt + kStagingBytes;
  static constexpr int kBytes = kBarriersAt + 2 * kSlots * 8;
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

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
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

// A position in a ring of slots, and the barriers there.
template <int kSlots>
struct Ring {
  uint32_t barriers;
  int slot = 0;
  uint32_t parity = 0;

  __device__ explicit Ring(uint32_t barriers) : barriers(barriers) {}

  __device__ uint32_t full() const { return barriers + slot * 8; }
  __device__ uint32_t free() const { return barriers + (kSlots + slot) * 8; }
  __device__ void wait_full() const { barrier_wait(full(), parity); }
  __device__ void wait_free() const { barrier_wait(free(), parity ^ 1); }

  __device__ void init(int fillers, int users) const {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(barriers + i * 8, fillers);
      barrier_init(barriers + (kSlots + i) * 8, users);
    }
  }

  __device__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Copies a box of a matrix; what lies outside comes as zeros.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& from, int column, int row,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&from), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// Two bytes there and two bytes 8 bytes on: a thread's share of 16 columns of a row of A.
__device__ __forceinline__ uint32_t load_pairs(uint32_t address) {
  uint32_t pairs;
  asm volatile(
      "{\n.reg .b16 low, high;\n"
      "ld.shared.b16 low, [%1];\n"
      "ld.shared.b16 high, [%1 + 8];\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(pairs)
      : "r"(address)
      : "memory");
  return pairs;
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
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
  CUtensorMap upper, lower;  // uint8 [n, k]
  CUtensorMap x;             // [m, k]
  void* y;                   // [m, n]
  float* partials;           // one tile a block
  int* ready;                // one a block, 0 between launches
  int m, n, k;
};

// Steps `begin` to `end` of all tiles' steps; tiles that share weights follow each other.
struct Range {
  int64_t begin, end;

  __device__ Range(int64_t total, int block, int blocks)
      : begin(total * block / blocks), end(total * (block + 1) / blocks) {}
};

struct Tiling {
  int steps;  // a tile
  int token_tiles;
  int block, blocks;
  int64_t total;

  __device__ Tiling(const Problem& p, int tokens)
      : steps(p.k / kDepth),
        token_tiles((p.m + tokens - 1) / tokens),
        // Blocks start in order: one that waits for another's sum waits for one that began before.
        block(gridDim.x - 1 - blockIdx.x),
        blocks(gridDim.x),
        total(static_cast<int64_t>((p.n + kRows - 1) / kRows) * token_tiles * steps) {}

  __device__ Range range(int of_block) const { return Range(total, of_block, blocks); }

  // Calls `work(tile, first step, steps)` for every tile that the block has steps of.
  template <typename Work>
  __device__ __forceinline__ void each_tile(Work work) const {
    const Range mine = range(block);
    for (int64_t at = mine.begin; at < mine.end;) {
      const int tile = static_cast<int>(at / steps), first = static_cast<int>(at % steps);
      const int count = static_cast<int>(min(static_cast<int64_t>(steps - first), mine.end - at));
      work(tile, first, count);
      at += count;
    }
  }
};

template <int kTokens>
__device__ __forceinline__ void copy_steps(const Problem& p, const Tiling& tiling,
                                           uint32_t shared) {
  using L = Shared<kTokens>;
  Ring<L::kSlots> ring(shared + L::kBarriersAt);
  tiling.each_tile([&](int tile, int first, int count) {
    const int row = tile / tiling.token_tiles * kRows;
    const int token = tile % tiling.token_tiles * kTokens;
    for (int step = first; step < first + count; ++step) {
      const uint32_t to = shared + ring.slot * L::kSlotBytes;
      ring.wait_free();
      barrier_expect(ring.full(), L::kSlotBytes);
      copy_box(to + L::kInputBytes, p.upper, step * kDepth, row, ring.full());
      copy_box(to + L::kInputBytes + kHalfBytes, p.lower, step * kDepth, row, ring.full());
      copy_box(to, p.x, step * kDepth, token, ring.full());
      ring.advance();
    }
  });
}

// A step's weights of one warp: for every 16 columns a fragment of 4 registers.
using Fragments = uint32_t[kDepth / 16 * 4];

// Merges the warp's 16 rows of a step. The copy engine has swizzled chunks of 16 bytes: chunk c of a
// row of 64 bytes lies at c ^ (row / 2 % 4).
template <typename T, bool kE5M2>
__device__ __forceinline__ void merge_step(Fragments& weights, uint32_t halves, int lane) {
  const int row = lane / 4;  // and 8 rows on, which is swizzled alike
  const uint32_t at = halves + row * kDepth + lane % 4 * 2;
#pragma unroll
  for (int chunk = 0; chunk < kDepth / 16; ++chunk) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t from = at + h * 8 * kDepth + (chunk ^ (row / 2 % 4)) * 16;
      const uint2 four = merge_four<T, kE5M2>(load_pairs(from), load_pairs(from + kHalfBytes));
      weights[chunk * 4 + h] = four.x;
      weights[chunk * 4 + h + 2] = four.y;
    }
  }
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
__device__ __forceinline__ void leave_partial(const Problem& p, int block, int thread,
                                              const float (&sum)[kValues]) {
  float* to = p.partials + static_cast<int64_t>(block) * kConsumers * kValues + thread;
#pragma unroll
  for (int i = 0; i < kValues; ++i) __stcg(to + i * kConsumers, sum[i]);
  named_barrier(1, kConsumers);  // and so the release below counts for all threads' sums
  if (thread == 0) publish(p.ready + block);
}

template <int kValues>
__device__ __forceinline__ void add_partial(const Problem& p, int block, int thread,
                                            float (&sum)[kValues]) {
  await(p.ready + block);
  const float* from = p.partials + static_cast<int64_t>(block) * kConsumers * kValues + thread;
#pragma unroll
  for (int i = 0; i < kValues; ++i) sum[i] += __ldcg(from + i * kConsumers);
  named_barrier(1, kConsumers);
  if (thread == 0) p.ready[block] = 0;
}

// Writes one warpgroup's [64, kTokens] of a tile, transposed through shared memory.
template <typename T, int kTokens>
__device__ __forceinline__ void write_tile(const Problem& p, int row, int token, uint32_t staging,
                                           int group, int thread,
                                           const float (&sum)[kTokens / 2]) {
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
        uint4 v = load_shared(staging + r * kStagedPitch + thread % 8 * 16);
        *reinterpret_cast<uint4*>(static_cast<T*>(p.y) + static_cast<int64_t>(to) * p.n + column) =
            v;
      }
    }
  }
}

template <typename T, bool kE5M2, int kTokens>
__device__ __forceinline__ void consume(const Problem& p, const Tiling& tiling, uint32_t shared,
                                        int group, int thread) {
  using L = Shared<kTokens>;
  Ring<L::kSlots> ring(shared + L::kBarriersAt);
  const int lane = thread % 32;
  const uint32_t rows_at = L::kInputBytes + thread / 32 * 16 * kDepth;
  float sum[kTokens / 2];
  Fragments one, other;
  auto merge_next = [&](Fragments& weights) {
    ring.wait_full();
    merge_step<T, kE5M2>(weights, shared + ring.slot * L::kSlotBytes + rows_at, lane);
  };
  // Multiplies the step in `now` and merges the one after it, if there is one, into `next`.
  auto multiply = [&](const Fragments& now, Fragments& next, bool add, bool more) {
    const uint64_t input = tile_descriptor(shared + ring.slot * L::kSlotBytes);
    const uint32_t free = ring.free();
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kDepth / 16; ++part) {
      // 16 elements of K are 32 bytes, 2 in a descriptor.
      Wgmma<T, kTokens>::multiply(sum, now + 4 * part, input + 2 * part, part > 0 || add);
    }
    wgmma_commit();
    ring.advance();
    if (more) merge_next(next);
    wgmma_wait();
    if (lane == 0) barrier_arrive(free);
  };
  tiling.each_tile([&](int tile, int first, int count) {
    merge_next(one);
    for (int i = 0; i < count; i += 2) {
      multiply(one, other, i > 0, i + 1 < count);
      if (i + 1 < count) multiply(other, one, true, i + 2 < count);
    }
    if (first > 0) {
      leave_partial(p, tiling.block, thread, sum);
    } else {
      const int64_t end = static_cast<int64_t>(tile + 1) * tiling.steps;
      for (int block = tiling.block + 1; tiling.range(block - 1).end < end; ++block) {
        add_partial(p, block, thread, sum);
      }
      write_tile<T, kTokens>(p, tile / tiling.token_tiles * kRows + group * 64,
                             tile % tiling.token_tiles * kTokens,
                             shared + L::kStagingAt + group * (L::kStagingBytes / 2), group,
                             thread % 128, sum);
    }
  });
}

template <typename T, bool kE5M2, int kTokens>
__global__ void __launch_bounds__(kThreads, kBlocks<kTokens>)
    merge_gemm_kernel(const __grid_constant__ Problem p) {
  using L = Shared<kTokens>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  if (threadIdx.x == 0) {
    Ring<L::kSlots>(shared + L::kBarriersAt).init(1, kConsumers / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x == kConsumers) {
    for (const CUtensorMap* map : {&p.upper, &p.lower, &p.x}) {
      asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
    }
  }
  __syncthreads();
  const Tiling tiling(p, kTokens);
  const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);  // the same in a whole warp
  // A multiprocessor has 65536 registers: the consumers take over most of the copier's.
  constexpr int kRegisters = kBlocks<kTokens> == 1 ? 240 : 104;
  if (group < kConsumers / 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
    consume<T, kE5M2, kTokens>(p, tiling, shared, group, threadIdx.x);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == kConsumers) copy_steps<kTokens>(p, tiling, shared);
  }
}

// Host

inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    TVM_FFI_ICHECK(error == cudaSuccess && found) << "the driver has no cuTensorMapEncodeTiled";
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  return encoder;
}

// Boxes of `box_rows` rows by `kDepth` columns of a row-major matrix; `pitch` in bytes.
inline CUtensorMap boxes(void* data, CUtensorMapDataType type, int rows, int columns, int64_t pitch,
                         int box_rows, CUtensorMapSwizzle swizzle) {
  CUtensorMap map;
  const cuuint64_t size[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(pitch)};
  const cuuint32_t box[] = {kDepth, static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  const CUresult result = tensor_map_encoder()(
      &map, type, 2, data, size, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_ICHECK_EQ(result, CUDA_SUCCESS) << "no tensor map of [" << rows << ", " << columns
                                          << "], " << pitch << " bytes a row";
  return map;
}

template <typename T>
constexpr CUtensorMapDataType kElement = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <>
constexpr CUtensorMapDataType kElement<__half> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

template <typename T, bool kE5M2, int kTokens>
void launch(Problem& p, void* x, int64_t x_stride, int processors, cudaStream_t stream) {
  constexpr int kBytes = Shared<kTokens>::kBytes;
  static_assert(Shared<kTokens>::kSlots >= 2, "no room to copy ahead");
  auto kernel = merge_gemm_kernel<T, kE5M2, kTokens>;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  TVM_FFI_ICHECK_EQ(allowed, cudaSuccess) << cudaGetErrorString(allowed);
  p.x = boxes(x, kElement<T>, p.m, p.k, x_stride * 2, kTokens, CU_TENSOR_MAP_SWIZZLE_128B);
  const int64_t steps = static_cast<int64_t>((p.n + kRows - 1) / kRows) *
                        ((p.m + kTokens - 1) / kTokens) * (p.k / kDepth);
  const int grid = static_cast<int>(std::min<int64_t>(processors * kBlocks<kTokens>, steps));
  kernel<<<grid, kThreads, kBytes, stream>>>(p);
  const cudaError_t error = cudaGetLastError();
  TVM_FFI_ICHECK_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

// upper, lower: uint8 [N, K]; x: T [M, K]; y: T [M, N]; for every multiprocessor, partials: float32,
// a tile of 128 by 256, and ready: int32, `kMostBlocks` zeros. K is a multiple of 64, N of 8; M is
// not 0. Checked by the caller.
template <typename T, bool kE5M2>
void merge_gemm(tvm::ffi::TensorView upper, tvm::ffi::TensorView lower, tvm::ffi::TensorView x,
                tvm::ffi::TensorView y, tvm::ffi::TensorView partials, tvm::ffi::TensorView ready) {
  Problem p;
  p.m = static_cast<int>(x.size(0));
  p.n = static_cast<int>(upper.size(0));
  p.k = static_cast<int>(upper.size(1));
  const auto half = [&](tvm::ffi::TensorView bytes) {
    return boxes(bytes.data_ptr(), CU_TENSOR_MAP_DATA_TYPE_UINT8, p.n, p.k, p.k, kRows,
                 CU_TENSOR_MAP_SWIZZLE_64B);
  };
  p.upper = half(upper);
  p.lower = half(lower);
  p.y = y.data_ptr();
  p.partials = static_cast<float*>(partials.data_ptr());
  p.ready = static_cast<int*>(ready.data_ptr());
  const int processors = static_cast<int>(ready.size(0)) / kMostBlocks;
  const auto device = x.device();
  const auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  const auto run = [&](auto launcher) { launcher(p, x.data_ptr(), x.stride(0), processors, stream); };
  if (p.m <= 16) {
    run(launch<T, kE5M2, 16>);
  } else if (p.m <= 32) {
    run(launch<T, kE5M2, 32>);
  } else if (p.m <= 64) {
    run(launch<T, kE5M2, 64>);
  } else if (p.m <= 128) {
    run(launch<T, kE5M2, 128>);
  } else {
    run(launch<T, kE5M2, 256>);
  }
}

}  // namespace sglang_morph
