// wgmma: D[64, N] += A[64, 16] * B[N, 16]^T by one warpgroup, A in registers, B in shared memory.
//
// Thread t of the warpgroup holds, with w = t / 32, g = t % 32 / 4 and q = t % 4,
//     a[h + 2 * f] = A[16 * w + 8 * h + g][8 * f + 2 * q], and the element after it in the high half
//     d[4 * j + 2 * h + e] = D[16 * w + 8 * h + g][8 * j + 2 * q + e].
// B is a K-major tile of 64 elements (128 bytes) a row with 16-byte chunks swizzled: chunk c of row r
// lies at chunk c ^ (r % 8).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sglang_morph {

// Describes a tile of B that starts at a shared address, a multiple of 1024, plus 32 bytes for every
// 16 elements of K. Groups of 8 rows are 1024 bytes apart; layout 1 is the swizzle of 128 bytes.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address) {
  constexpr uint64_t kGroupStride = 1024 >> 4;
  return ((address & 0x3FFFF) >> 4) | (1ull << 16) | (kGroupStride << 32) | (1ull << 62);
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kLeft` groups are under way; registers of the others' A may change then.
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// `add` false: D is overwritten.
template <typename T, int kColumns>
struct Wgmma;

// Operands of the instruction, 8 registers of D at a time: their places, and what stands there.
#define MORPH_PLACES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MORPH_PLACES_16 MORPH_PLACES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MORPH_PLACES_32 MORPH_PLACES_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23" \
  ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MORPH_PLACES_64 MORPH_PLACES_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39" \
  ", %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55" \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MORPH_PLACES_128 MORPH_PLACES_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71" \
  ", %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87" \
  ", %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103" \
  ", %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119" \
  ", %120, %121, %122, %123, %124, %125, %126, %127"

#define MORPH_SUMS_8(i)                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define MORPH_SUMS_16(i) MORPH_SUMS_8(i), MORPH_SUMS_8(i + 8)
#define MORPH_SUMS_32(i) MORPH_SUMS_16(i), MORPH_SUMS_16(i + 16)
#define MORPH_SUMS_64(i) MORPH_SUMS_32(i), MORPH_SUMS_32(i + 32)
#define MORPH_SUMS_128(i) MORPH_SUMS_64(i), MORPH_SUMS_64(i + 64)

// `sums` registers of D; behind them the places of A, of B and of `add`.
#define MORPH_WGMMA(type, name, columns, sums, a_and_b, add_at)                            \
  template <>                                                                              \
  struct Wgmma<type, columns> {                                                            \
    static __device__ __forceinline__ void multiply(float (&d)[sums], const uint32_t* a,   \
                                                    uint64_t b, bool add) {                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_at ", 0;\n"                     \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." name "." name   \
                   " {" MORPH_PLACES_##sums "}, " a_and_b ", p, 1, 1, 0;\n}\n"             \
                   : MORPH_SUMS_##sums(0)                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                   \
                     "r"(static_cast<int>(add)));                                          \
    }                                                                                      \
  };

#define MORPH_WGMMAS(type, name)                                                       \
  MORPH_WGMMA(type, name, 16, 8, "{%8, %9, %10, %11}, %12", "%13") \
  MORPH_WGMMA(type, name, 32, 16, "{%16, %17, %18, %19}, %20", "%21") \
  MORPH_WGMMA(type, name, 64, 32, "{%32, %33, %34, %35}, %36", "%37") \
  MORPH_WGMMA(type, name, 128, 64, "{%64, %65, %66, %67}, %68", "%69") \
  MORPH_WGMMA(type, name, 256, 128, "{%128, %129, %130, %131}, %132", "%133")

MORPH_WGMMAS(__nv_bfloat16, "bf16")
MORPH_WGMMAS(__half, "f16")

#undef MORPH_WGMMAS
#undef MORPH_WGMMA

}  // namespace sglang_morph
