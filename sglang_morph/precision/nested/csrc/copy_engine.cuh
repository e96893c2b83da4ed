// Copies by the copy engine (TMA) into a ring of slots in shared memory, and the barriers there.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <tvm/ffi/error.h>

#include <cstdint>

namespace sglang_morph {

constexpr int kSharedBytes = 232448 - 1024;  // that a block may use
constexpr int kBoxColumns = 64;  // of a box of x: 128 bytes, as the swizzle wants

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
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

__device__ __forceinline__ void barriers_are_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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

__device__ __forceinline__ void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
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

// Boxes of `box_rows` rows by `kBoxColumns` columns of a row-major matrix; `pitch` in bytes.
inline CUtensorMap boxes(void* data, CUtensorMapDataType type, int rows, int columns, int64_t pitch,
                         int box_rows, CUtensorMapSwizzle swizzle) {
  CUtensorMap map;
  const cuuint64_t size[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(pitch)};
  const cuuint32_t box[] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)}, steps[] = {1, 1};
  const CUresult result = tensor_map_encoder()(
      &map, type, 2, data, size, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_ICHECK_EQ(result, CUDA_SUCCESS) << "no tensor map of [" << rows << ", " << columns
                                          << "], " << pitch << " bytes a row";
  return map;
}

}  // namespace sglang_morph
