// y[M, N] = x[M, K] * W[N, K]^T for M up to 32, W from its nested halves: as fast as memory gives W.
//
// Each warp takes its rows of both halves from memory straight to registers, 16 bytes a thread,
// two steps ahead, merges them there, and multiplies. No instruction moves weights from one
// thread to another: a thread's 16 columns of a row are what it multiplies in four products, so those
// products sum over columns in another order than memory has them, and x, which lies in shared
// memory, is read in the same order. The warps of a block divide a tile's rows, and each step's
// columns.
#pragma once

#include "copy_engine.cuh"
#include "halves.cuh"
#include "stream_k.cuh"

namespace sglang_morph {

template <int kTokens>
struct Few {
  static constexpr int kWarps = 16;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kDepthWarps = 4;  // of these, along K; so tiles are small, and are shared by
                                         // few blocks
  static constexpr int kWarpRows = 16;
  static constexpr int kTokenTiles = kTokens / 8;
  static constexpr int kRows = kWarps / kDepthWarps * kWarpRows;  // of W in a tile
  static constexpr int kDepth = kDepthWarps * kBoxColumns;        // columns of K in a step
  static constexpr int kAhead = 2;                                // steps that are loaded ahead

  static constexpr int kBoxBytes = kTokens * kBoxColumns * 2;
  static constexpr int kSlotBytes = kDepthWarps * kBoxBytes;
  static constexpr int kSlots = 8;
  static constexpr int kLag = 3;  // steps that a warp may be behind the first
  // A thread's sums are pairs, of two tokens and one row. Of these it adds up some for all warps.
  static constexpr int kPairs = kTokenTiles * 2;
  static constexpr int kOwnPairs = kPairs / kDepthWarps;
  static constexpr int kSumBytes = (kDepthWarps - 1) * kOwnPairs * kThreads * 8;
  static constexpr int kStagedPitch = kRows * 2 + 16;  // bytes; the padding keeps banks apart

  static constexpr int kSumsAt = kSlots * kSlotBytes;
  static constexpr int kStagingAt = kSumsAt + kSumBytes;
  static constexpr int kBarriersAt = kStagingAt + kTokens * kStagedPitch;
  static constexpr int kBytes = kBarriersAt + 2 * kSlots * 8;
};

struct FewProblem {
  const uint8_t *upper, *lower;  // [n, k]
  CUtensorMap x;                 // [m, k]
  void* y;                       // [m, n]
  float2* partials;              // a tile a block
  int* ready;                    // one a block, 0 between launches
  int m, n, k;
};

// 16 bytes that are read once.
__device__ __forceinline__ uint4 load_stream(const uint8_t* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// A thread's weights of a step: of two rows, 8 apart, 16 columns of both halves.
struct HalvesOfStep {
  uint4 upper[2], lower[2];
};

// Where a thread's weights of the next steps are.
template <int kTokens>
class WeightCursor {
 public:
  __device__ WeightCursor(const FewProblem& p, const Tiling& tiling, int row_warp, int depth_warp,
                          int lane)
      : p_(p),
        first_row_(row_warp * L::kWarpRows + lane / 4),
        first_column_(depth_warp * kBoxColumns + lane % 4 * 16) {
    const Range mine = tiling.range(tiling.block);
    left_ = static_cast<int>(mine.end - mine.begin);
    steps_ = tiling.steps;
    tile_ = static_cast<int>(mine.begin / steps_);
    step_ = static_cast<int>(mine.begin % steps_);
    find_rows();
  }

  // Enqueues the loads of the step; zeros behind the last step and the last column.
  __device__ __forceinline__ void load_next(HalvesOfStep& to) {
    const int column = step_ * L::kDepth + first_column_;
    if (left_ > 0 && column < p_.k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t at = rows_[i] + column;
        to.upper[i] = load_stream(p_.upper + at);
        to.lower[i] = load_stream(p_.lower + at);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) to.upper[i] = to.lower[i] = make_uint4(0, 0, 0, 0);
    }
    --left_;
    if (++step_ == steps_) {
      step_ = 0;
      ++tile_;
      find_rows();
    }
  }

 private:
  using L = Few<kTokens>;

  // Rows behind the last are replaced by it: nobody wants their results.
  __device__ __forceinline__ void find_rows() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(tile_ * L::kRows + first_row_ + 8 * i, p_.n - 1);
      rows_[i] = static_cast<uint32_t>(row) * static_cast<uint32_t>(p_.k);
    }
  }

  const FewProblem& p_;
  const int first_row_, first_column_;
  uint32_t rows_[2];  // their offsets
  int left_, steps_, tile_, step_;
};

// D[16, 8] += A[16, 16] * B[8, 16]^T by a warp. Thread t holds, with g = t / 4 and q = t % 4,
//     a[h + 2 * f] = A[g + 8 * h][8 * f + 2 * q], b[f] = B[g][8 * f + 2 * q], each with the element
//     after it in the high half, and d[h] = D[g + 8 * h][2 * q] and the element after it.
#define MORPH_MULTIPLY_ADD(type, name)                                                           \
  __device__ __forceinline__ void multiply_add(float2 (&d)[2], const uint32_t (&a)[4], uint32_t b0, \
                                               uint32_t b1, type) {                              \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 "                           \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                        \
        : "+f"(d[0].x), "+f"(d[0].y), "+f"(d[1].x), "+f"(d[1].y)                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                         \
  }

MORPH_MULTIPLY_ADD(__nv_bfloat16, "bf16")
MORPH_MULTIPLY_ADD(__half, "f16")

#undef MORPH_MULTIPLY_ADD

// A thread's merged weights of a step: for 4 of a thread's columns, one operand.
using Operands = uint32_t[4][4];

// By 8 tokens, and by row: the thread has two, 8 apart.
template <int kTokens>
using Sums = float2[Few<kTokens>::kTokenTiles][2];

template <typename T, bool kE5M2>
__device__ __forceinline__ void merge(Operands& to, const HalvesOfStep& halves) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint32_t upper[] = {halves.upper[row].x, halves.upper[row].y, halves.upper[row].z,
                              halves.upper[row].w};
    const uint32_t lower[] = {halves.lower[row].x, halves.lower[row].y, halves.lower[row].z,
                              halves.lower[row].w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const uint2 four = merge_four<T, kE5M2>(upper[word], lower[word]);
      to[word][row] = four.x;
      to[word][row + 2] = four.y;
    }
  }
}

// Adds a step's products; `x` is the box of the warp's columns. Chunk c of 16 bytes of row r lies at
// c ^ (r % 8). The thread reads of each token the columns that it has of the weights.
template <typename T, int kTokens>
__device__ __forceinline__ void multiply(Sums<kTokens>& sum, const Operands& weights, uint32_t x,
                                         int lane) {
  const int token = lane / 4, chunk = lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t at = x + token * 128 + ((chunk + half) ^ token) * 16;
#pragma unroll
    for (int tile = 0; tile < Few<kTokens>::kTokenTiles; ++tile) {
      const uint4 v = load_shared(at + tile * 8 * 128);
      multiply_add(sum[tile], weights[2 * half], v.x, v.y, T());
      multiply_add(sum[tile], weights[2 * half + 1], v.z, v.w, T());
    }
  }
}

__device__ __forceinline__ void add_to(float2& sum, const float2& other) {
  sum.x += other.x;
  sum.y += other.y;
}

// The sums of a tile: of all the block's warps, then of all blocks, then to y.
template <typename T, int kTokens>
struct FewTile {
  using L = Few<kTokens>;

  const FewProblem& p;
  const Tiling& tiling;
  uint8_t* memory;
  int row_warp, depth_warp, lane, thread;

  __device__ static constexpr int owner(int pair) { return pair / L::kOwnPairs; }

  // Calls `work(pair, token tile, row)`.
  template <typename Work>
  __device__ __forceinline__ void each_pair(Work work) const {
#pragma unroll
    for (int pair = 0; pair < L::kPairs; ++pair) {
      work(pair, pair / 2, pair % 2);
    }
  }

  // Calls `work(number among the warp's own, ...)` likewise. No register is indexed by a variable.
  template <typename Work>
  __device__ __forceinline__ void each_own(Work work) const {
    each_pair([&](int pair, int tokens, int row) {
      if (owner(pair) == depth_warp) work(pair % L::kOwnPairs, tokens, row);
    });
  }

  // Each warp adds up its own pairs of all that have the same rows.
  __device__ __forceinline__ void add_up_warps(Sums<kTokens>& sum) const {
    constexpr int kOthers = L::kDepthWarps - 1, kLanes = L::kThreads / L::kDepthWarps;
    float2* sums = reinterpret_cast<float2*>(memory + L::kSumsAt) + row_warp * 32 + lane;
    each_pair([&](int pair, int tokens, int row) {
      const int other = depth_warp - (depth_warp > owner(pair));
      if (owner(pair) != depth_warp) sums[(pair * kOthers + other) * kLanes] = sum[tokens][row];
    });
    named_barrier(1, L::kThreads);
    each_own([&](int own, int tokens, int row) {
      const int pair = depth_warp * L::kOwnPairs + own;
#pragma unroll
      for (int other = 0; other < kOthers; ++other) {
        add_to(sum[tokens][row], sums[(pair * kOthers + other) * kLanes]);
      }
    });
  }

  __device__ __forceinline__ float2* partial(int block, int own) const {
    return p.partials + (static_cast<int64_t>(block) * L::kOwnPairs + own) * L::kThreads + thread;
  }

  __device__ __forceinline__ void leave(const Sums<kTokens>& sum) const {
    each_own([&](int own, int tokens, int row) {
      __stcg(partial(tiling.block, own), sum[tokens][row]);
    });
    named_barrier(1, L::kThreads);  // and so the release below counts for all threads' sums
    if (thread == 0) publish(p.ready + tiling.block);
  }

  __device__ __forceinline__ void add_up_blocks(int tile, Sums<kTokens>& sum) const {
    const int last = tiling.last_block(tile);
    if (last == tiling.block) return;
    await_blocks(p.ready, tiling.block, last, thread);
    named_barrier(1, L::kThreads);
    for (int block = tiling.block + 1; block <= last; ++block) {
      each_own([&](int own, int tokens, int row) {
        add_to(sum[tokens][row], __ldcg(partial(block, own)));
      });
    }
  }

  // Through shared memory, so that rows of y are written 16 bytes at a time.
  __device__ __forceinline__ void write(int tile, const Sums<kTokens>& sum) const {
    uint8_t* staging = memory + L::kStagingAt;
    each_own([&](int, int tokens, int row) {
      const int of_tile = row_warp * L::kWarpRows + row * 8 + lane / 4;
      uint8_t* to = staging + (tokens * 8 + lane % 4 * 2) * L::kStagedPitch + of_tile * 2;
      *reinterpret_cast<T*>(to) = T(sum[tokens][row].x);
      *reinterpret_cast<T*>(to + L::kStagedPitch) = T(sum[tokens][row].y);
    });
    named_barrier(1, L::kThreads);
    constexpr int kChunks = L::kRows / 8;  // of 16 bytes, of a token
    const int column = tile * L::kRows + thread % kChunks * 8;
    if (column >= p.n) return;
    for (int token = thread / kChunks; token < min(kTokens, p.m); token += L::kThreads / kChunks) {
      T* to = static_cast<T*>(p.y) + static_cast<int64_t>(token) * p.n + column;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(
          staging + token * L::kStagedPitch + thread % kChunks * 16);
    }
  }
};

// Has the copy engine bring x to shared memory; by one thread, which multiplies as well.
template <int kTokens>
class InputCopier {
 public:
  __device__ InputCopier(const FewProblem& p, const Tiling& tiling, uint32_t shared)
      : p_(p), shared_(shared), ring_(shared + L::kBarriersAt), steps_(tiling.steps) {
    const Range mine = tiling.range(tiling.block);
    left_ = static_cast<int>(mine.end - mine.begin);
    step_ = static_cast<int>(mine.begin % steps_);
  }

  // Enqueues the copy of the next step, once its slot is free.
  __device__ __forceinline__ void copy_next() {
    if (left_ == 0) return;
    ring_.wait_free();
    barrier_expect(ring_.full(), L::kSlotBytes);
#pragma unroll
    for (int box = 0; box < L::kDepthWarps; ++box) {
      copy_box(shared_ + ring_.slot * L::kSlotBytes + box * L::kBoxBytes, p_.x,
               step_ * L::kDepth + box * kBoxColumns, 0, ring_.full());
    }
    ring_.advance();
    --left_;
    if (++step_ == steps_) step_ = 0;
  }

 private:
  using L = Few<kTokens>;

  const FewProblem& p_;
  uint32_t shared_;
  Ring<L::kSlots> ring_;
  int steps_, step_, left_;
};

template <typename T, bool kE5M2, int kTokens>
__device__ __forceinline__ void multiply_steps(const FewProblem& p, const Tiling& tiling,
                                               uint8_t* memory) {
  using L = Few<kTokens>;
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0);  // so the compiler knows it for all
  const int depth_warp = warp % L::kDepthWarps, row_warp = warp / L::kDepthWarps;
  const FewTile<T, kTokens> ends{p, tiling, memory, row_warp, depth_warp, lane, thread};
  const uint32_t shared = shared_address(memory);
  Ring<L::kSlots> ring(shared + L::kBarriersAt);
  WeightCursor<kTokens> cursor(p, tiling, row_warp, depth_warp, lane);
  HalvesOfStep ahead[L::kAhead];
#pragma unroll
  for (int i = 0; i < L::kAhead; ++i) cursor.load_next(ahead[i]);
  InputCopier<kTokens> copier(p, tiling, shared);
  if (thread == 0) {
    for (int i = 0; i < L::kSlots - L::kLag; ++i) copier.copy_next();
  }

  Sums<kTokens> sum;
  const auto clear = [&] {
    ends.each_pair([&](int, int tokens, int row) {
      sum[tokens][row] = make_float2(0, 0);
    });
  };
  clear();
  const Range mine = tiling.range(tiling.block);
  int left = static_cast<int>(mine.end - mine.begin);
  int tile = static_cast<int>(mine.begin / tiling.steps);
  int first = static_cast<int>(mine.begin % tiling.steps), step = first;
  while (left > 0) {
#pragma unroll
    for (int i = 0; i < L::kAhead; ++i) {
      if (left == 0) break;
      Operands weights;
      merge<T, kE5M2>(weights, ahead[i]);
      cursor.load_next(ahead[i]);
      if (thread == 0) copier.copy_next();
      __syncwarp();
      ring.wait_full();
      multiply<T, kTokens>(sum, weights,
                           shared + ring.slot * L::kSlotBytes + depth_warp * L::kBoxBytes, lane);
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.free());
      ring.advance();
      --left;
      if (++step == tiling.steps || left == 0) {
        ends.add_up_warps(sum);
        if (first > 0) {
          ends.leave(sum);
        } else {
          ends.add_up_blocks(tile, sum);
          ends.write(tile, sum);
        }
        clear();
        ++tile;
        first = step = 0;
      }
    }
  }
}

template <typename T, bool kE5M2, int kTokens>
__global__ void __launch_bounds__(Few<kTokens>::kThreads, 1)
    few_tokens_kernel(const __grid_constant__ FewProblem p) {
  using L = Few<kTokens>;
  static_assert(L::kBytes <= kSharedBytes, "more shared memory than a block may use");
  extern __shared__ __align__(1024) uint8_t memory[];
  if (threadIdx.x == 0) {
    prefetch(p.x);
    Ring<L::kSlots>(shared_address(memory) + L::kBarriersAt).init(1, L::kWarps);
    barriers_are_ready();
  }
  __syncthreads();
  multiply_steps<T, kE5M2, kTokens>(p, Tiling(p.n, 1, p.k, L::kRows, 1, L::kDepth), memory);
}

}  // namespace sglang_morph
