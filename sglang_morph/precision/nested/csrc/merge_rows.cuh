// Rows of a weight from their nested halves, exceptions included, in one launch: bound by memory.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "halves.cuh"

namespace sglang_morph {

constexpr int kMergeThreads = 256;
constexpr int kMergeVector = 16;  // weights of a thread: a 16-byte load of each half
constexpr int kMergeTile = kMergeThreads * kMergeVector;

// Of a bf16 weight: the elements that fp16 cannot hold. `starts`: where each row's begin in the other
// two; null if there are none. `index` counts from the whole weight's first element.
struct Exceptions {
  const int* starts;
  const int* index;
  const uint16_t* bits;
};

// upper, lower, out: from the first of the rows on; `origin` elements of the weight come before it,
// `count` are to be merged, a multiple of kMergeVector, as is a row.
template <typename T, bool kE5M2>
__global__ void __launch_bounds__(kMergeThreads)
    merge_rows_kernel(const uint8_t* upper, const uint8_t* lower, T* out, int64_t origin,
                      int64_t count, int columns, Exceptions exceptions) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kMergeTile;
  const int64_t at = begin + threadIdx.x * kMergeVector;
  if (at < count) {
    const uint4 u = *reinterpret_cast<const uint4*>(upper + at);
    const uint4 l = *reinterpret_cast<const uint4*>(lower + at);
    const uint2 a = merge_four<T, kE5M2>(u.x, l.x), b = merge_four<T, kE5M2>(u.y, l.y);
    const uint2 c = merge_four<T, kE5M2>(u.z, l.z), d = merge_four<T, kE5M2>(u.w, l.w);
    uint4* target = reinterpret_cast<uint4*>(out + at);
    target[0] = {a.x, a.y, b.x, b.y};
    target[1] = {c.x, c.y, d.x, d.y};
  }
  if (exceptions.starts == nullptr) return;
  __syncthreads();  // the exceptions overwrite what this block has written
  const int first = static_cast<int>(origin + begin);  // a weight has less than 2^31 elements
  const int last = static_cast<int>(origin + min(begin + kMergeTile, count)) - 1;
  const int stop = exceptions.starts[last / columns + 1];
  for (int i = exceptions.starts[first / columns] + threadIdx.x; i < stop; i += kMergeThreads) {
    const int element = exceptions.index[i];
    if (first <= element && element <= last) {
      reinterpret_cast<uint16_t*>(out)[element - origin] = exceptions.bits[i];
    }
  }
}

template <typename T, bool kE5M2>
void enqueue_merge(tvm::ffi::TensorView upper, tvm::ffi::TensorView lower, tvm::ffi::TensorView out,
                   int64_t first, Exceptions exceptions) {
  const int64_t columns = out.size(1), count = out.size(0) * columns, origin = first * columns;
  if (count == 0) return;
  const auto device = out.device();
  const auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  const auto grid = static_cast<unsigned>((count + kMergeTile - 1) / kMergeTile);
  merge_rows_kernel<T, kE5M2><<<grid, kMergeThreads, 0, stream>>>(
      static_cast<const uint8_t*>(upper.data_ptr()) + origin,
      static_cast<const uint8_t*>(lower.data_ptr()) + origin, static_cast<T*>(out.data_ptr()),
      origin, count, static_cast<int>(columns), exceptions);
  const cudaError_t error = cudaGetLastError();
  TVM_FFI_ICHECK_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

// upper, lower: uint8 [N, K]; out: T [R, K], rows `first` and following. K is a multiple of 16, and
// everything begins at one of 16 bytes. Checked by the caller.
template <typename T, bool kE5M2>
void merge_rows(tvm::ffi::TensorView upper, tvm::ffi::TensorView lower, tvm::ffi::TensorView out,
                int64_t first) {
  enqueue_merge<T, kE5M2>(upper, lower, out, first, {nullptr, nullptr, nullptr});
}

// starts: int32 [N + 1]; index: int32 [E]; bits: int16 [E].
template <typename T, bool kE5M2>
void merge_rows_with_exceptions(tvm::ffi::TensorView upper, tvm::ffi::TensorView lower,
                                tvm::ffi::TensorView out, int64_t first,
                                tvm::ffi::TensorView starts, tvm::ffi::TensorView index,
                                tvm::ffi::TensorView bits) {
  enqueue_merge<T, kE5M2>(upper, lower, out, first,
                          {static_cast<const int*>(starts.data_ptr()),
                           static_cast<const int*>(index.data_ptr()),
                           static_cast<const uint16_t*>(bits.data_ptr())});
}

}  // namespace sglang_morph
