// y[M, N] = x[M, K] * W[N, K]^T for more than 32 rows of x, where W is rebuilt from its nested halves
// on the way.
//
// A block works on tiles of 128 rows of W by `kTokens` rows of x, 64 columns of K a step. One thread
// has the copy engine bring the halves and x to shared memory ahead of time. Two warpgroups take
// fragments of both halves from there, merge them in registers, and multiply: W is wgmma's first
// operand, which may be registers, so merged weights never go through memory. While the tensor cores
// work on a step, the next one is merged.
#pragma once

#include "copy_engine.cuh"
#include "halves.cuh"
#include "stream_k.cuh"
#include "wgmma.cuh"

namespace sglang_morph {

constexpr int kRows = 128;  // of W in a tile
constexpr int kDepth = 64;  // columns of K in a step
constexpr int kHalfBytes = kRows * kDepth;  // one half of a tile's step
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 128;  // one of the last copies; wgmma counts in warpgroups
constexpr int kStagedTokens = 32;           // of the result, on its way out
constexpr int kStagedPitch = 64 * 2 + 16;   // bytes; the padding keeps banks apart

template <int kTokens>
struct Shared {
  static constexpr int kInputBytes = kTokens * kDepth * 2;
  static constexpr int kSlotBytes = kInputBytes + 2 * kHalfBytes;
  static constexpr int kStagingBytes = 2 * kStagedTokens * kStagedPitch;
  static constexpr int kSlots = (kSharedBytes - kStagingBytes - 256) / kSlotBytes;  // all that fit
  static constexpr int kStagingAt = kSlots * kSlotBytes;
  static constexpr int kBarriersAt = kStagingAt + kStagingBytes;
  static constexpr int kBytes = kBarriersAt + 2 * kSlots * 8;
};

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

struct ManyProblem {
  CUtensorMap upper, lower;  // uint8 [n, k]
  CUtensorMap x;             // [m, k]
  void* y;                   // [m, n]
  float* partials;           // one tile a block
  int* ready;                // one a block, 0 between launches
  int m, n, k;
};

template <int kTokens>
__device__ __forceinline__ void copy_steps(const ManyProblem& p, const Tiling& tiling,
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

template <int kValues>
__device__ __forceinline__ void leave_partial(const ManyProblem& p, int block, int thread,
                                              const float (&sum)[kValues]) {
  float* to = p.partials + static_cast<int64_t>(block) * kConsumers * kValues + thread;
#pragma unroll
  for (int i = 0; i < kValues; ++i) __stcg(to + i * kConsumers, sum[i]);
  named_barrier(1, kConsumers);  // and so the release below counts for all threads' sums
  if (thread == 0) publish(p.ready + block);
}

// Of all blocks after `block` up to `last`.
template <int kValues>
__device__ __forceinline__ void add_partials(const ManyProblem& p, int block, int last, int thread,
                                             float (&sum)[kValues]) {
  if (last == block) return;
  await_blocks(p.ready, block, last, thread);
  named_barrier(1, kConsumers);
  for (int other = block + 1; other <= last; ++other) {
    const float* from = p.partials + static_cast<int64_t>(other) * kConsumers * kValues + thread;
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum[i] += __ldcg(from + i * kConsumers);
  }
}

// Writes one warpgroup's [64, kTokens] of a tile, transposed through shared memory.
template <typename T, int kTokens>
__device__ __forceinline__ void write_tile(const ManyProblem& p, int row, int token, uint32_t staging,
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
__device__ __forceinline__ void consume(const ManyProblem& p, const Tiling& tiling, uint32_t shared,
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
  uint32_t in_use = 0;  // the barrier of the slot that is multiplied
  auto release = [&] {
    if (lane == 0 && in_use) barrier_arrive(in_use);
  };
  // Enqueues the products of the step in `now`, and merges the one after it, if there is one, into
  // `next`, which the step before has used. So the tensor cores have the next products in time.
  auto multiply = [&](const Fragments& now, Fragments& next, bool add, bool more) {
    const uint64_t input = tile_descriptor(shared + ring.slot * L::kSlotBytes);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < kDepth / 16; ++part) {
      // 16 elements of K are 32 bytes, 2 in a descriptor.
      Wgmma<T, kTokens>::multiply(sum, now + 4 * part, input + 2 * part, part > 0 || add);
    }
    wgmma_commit();
    wgmma_wait<1>();
    release();
    in_use = ring.free();
    ring.advance();
    if (more) merge_next(next);
  };
  tiling.each_tile([&](int tile, int first, int count) {
    merge_next(one);
    for (int i = 0; i < count; i += 2) {
      multiply(one, other, i > 0, i + 1 < count);
      if (i + 1 < count) multiply(other, one, true, i + 2 < count);
    }
    wgmma_wait<0>();
    release();
    in_use = 0;
    if (first > 0) {
      leave_partial(p, tiling.block, thread, sum);
    } else {
      add_partials(p, tiling.block, tiling.last_block(tile), thread, sum);
      write_tile<T, kTokens>(p, tile / tiling.token_tiles * kRows + group * 64,
                             tile % tiling.token_tiles * kTokens,
                             shared + L::kStagingAt + group * (L::kStagingBytes / 2), group,
                             thread % 128, sum);
    }
  });
}

template <typename T, bool kE5M2, int kTokens>
__global__ void __launch_bounds__(kThreads, 1)
    many_tokens_kernel(const __grid_constant__ ManyProblem p) {
  using L = Shared<kTokens>;
  static_assert(L::kSlots >= 2, "no room to copy ahead");
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  if (threadIdx.x == 0) {
    Ring<L::kSlots>(shared + L::kBarriersAt).init(1, kConsumers / 32);
    barriers_are_ready();
  }
  if (threadIdx.x == kConsumers) {
    for (const CUtensorMap* map : {&p.upper, &p.lower, &p.x}) prefetch(*map);
  }
  __syncthreads();
  const Tiling tiling(p.n, p.m, p.k, kRows, kTokens, kDepth);
  const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);  // the same in a whole warp
  // A multiprocessor has 65536 registers: the consumers take over most of the copier's.
  if (group < kConsumers / 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<T, kE5M2, kTokens>(p, tiling, shared, group, threadIdx.x);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == kConsumers) copy_steps<kTokens>(p, tiling, shared);
  }
}

}  // namespace sglang_morph
