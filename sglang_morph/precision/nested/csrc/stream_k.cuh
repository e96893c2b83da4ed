// Steps of all tiles dealt out evenly, as one range a block ("stream-K").
//
// A block that ends inside a tile leaves its sums to the tile's owner: the block that has the tile's
// first step adds the others' in a fixed order, so results do not depend on timing.
#pragma once

#include <cstdint>

namespace sglang_morph {

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

  // Tiles of `rows` of W by `tokens`, `depth` columns of K a step.
  __device__ Tiling(int n, int m, int k, int rows, int tokens, int depth)
      : steps((k + depth - 1) / depth),
        token_tiles((m + tokens - 1) / tokens),
        // Blocks start in order: one that waits for another's sum waits for one that began before.
        block(gridDim.x - 1 - blockIdx.x),
        blocks(gridDim.x),
        total(static_cast<int64_t>((n + rows - 1) / rows) * token_tiles * steps) {}

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

  // The last block that has steps of a tile; those between it and the owner have some too.
  __device__ __forceinline__ int last_block(int tile) const {
    const int64_t end = static_cast<int64_t>(tile + 1) * steps;
    int last = block;
    while (range(last).end < end) ++last;
    return last;
  }
};

// `flag` is 0 between launches.
__device__ __forceinline__ void publish(int* flag) {
  asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}

// Waits for the blocks after `block` up to `last`; for a whole block of threads, which must meet at
// a barrier then.
__device__ __forceinline__ void await_blocks(int* ready, int block, int last, int thread) {
  if (thread >= last - block) return;
  int* flag = ready + block + 1 + thread;
  int value;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  } while (value == 0);
  *flag = 0;
}

}  // namespace sglang_morph
