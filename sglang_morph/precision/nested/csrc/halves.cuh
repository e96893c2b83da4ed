// Weights from their upper and lower bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sglang_morph {

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

}  // namespace sglang_morph
