// y[M, N] = x[M, K] * W[N, K]^T, where W is rebuilt from its nested halves on the way. The halves are
// read as they are, row-major, and the same upper halves serve an FP8 GEMM.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>
#include <type_traits>

#include "few_tokens.cuh"
#include "many_tokens.cuh"

namespace sglang_morph {

// upper, lower: uint8 [N, K]; x: T [M, K]; y: T [M, N]; for every multiprocessor, partials: float32,
// a tile of 128 by 256, and ready: int32, a zero. K is a multiple of 64, N of 8; M is not 0. Checked
// by the caller.
template <typename T, bool kE5M2>
class MergeGemm {
 public:
  MergeGemm(tvm::ffi::TensorView upper, tvm::ffi::TensorView lower, tvm::ffi::TensorView x,
            tvm::ffi::TensorView y, tvm::ffi::TensorView partials, tvm::ffi::TensorView ready)
      : upper_(upper), lower_(lower), x_(x), y_(y), partials_(partials), ready_(ready) {}

  void enqueue() const {
    if (m() <= 16) {
      few<16>();
    } else if (m() <= 32) {
      few<32>();
    } else if (m() <= 64) {
      many<64>();
    } else if (m() <= 128) {
      many<128>();
    } else {
      many<256>();
    }
  }

 private:
  static constexpr auto kElement = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  tvm::ffi::TensorView upper_, lower_, x_, y_, partials_, ready_;

  int m() const { return static_cast<int>(x_.size(0)); }
  int n() const { return static_cast<int>(upper_.size(0)); }
  int k() const { return static_cast<int>(upper_.size(1)); }

  CUtensorMap boxes_of_x(int tokens) const {
    return boxes(x_.data_ptr(), kElement, m(), k(), x_.stride(0) * 2, tokens,
                 CU_TENSOR_MAP_SWIZZLE_128B);
  }

  CUtensorMap boxes_of_half(tvm::ffi::TensorView half) const {
    return boxes(half.data_ptr(), CU_TENSOR_MAP_DATA_TYPE_UINT8, n(), k(), k(), kRows,
                 CU_TENSOR_MAP_SWIZZLE_64B);
  }

  template <typename Problem>
  Problem problem() const {
    Problem p;
    p.y = y_.data_ptr();
    p.partials = static_cast<decltype(p.partials)>(partials_.data_ptr());
    p.ready = static_cast<int*>(ready_.data_ptr());
    p.m = m();
    p.n = n();
    p.k = k();
    return p;
  }

  template <int kTokens>
  void few() const {
    using L = Few<kTokens>;
    FewProblem p = problem<FewProblem>();
    p.upper = static_cast<const uint8_t*>(upper_.data_ptr());
    p.lower = static_cast<const uint8_t*>(lower_.data_ptr());
    p.x = boxes_of_x(kTokens);
    launch<few_tokens_kernel<T, kE5M2, kTokens>>(p, L::kThreads, L::kBytes,
                                                 steps(L::kRows, kTokens, L::kDepth));
  }

  template <int kTokens>
  void many() const {
    using L = Shared<kTokens>;
    ManyProblem p = problem<ManyProblem>();
    p.upper = boxes_of_half(upper_);
    p.lower = boxes_of_half(lower_);
    p.x = boxes_of_x(kTokens);
    launch<many_tokens_kernel<T, kE5M2, kTokens>>(p, kThreads, L::kBytes,
                                                  steps(kRows, kTokens, kDepth));
  }

  int64_t steps(int rows, int tokens, int depth) const {
    const auto parts = [](int whole, int part) { return (whole + part - 1) / part; };
    return static_cast<int64_t>(parts(n(), rows)) * parts(m(), tokens) * parts(k(), depth);
  }

  // As many blocks as there are multiprocessors, or as can have a step each.
  template <auto kKernel, typename Problem>
  void launch(const Problem& p, int threads, int shared_bytes, int64_t most_blocks) const {
    static const cudaError_t allowed =
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    TVM_FFI_ICHECK_EQ(allowed, cudaSuccess) << cudaGetErrorString(allowed);
    const auto device = x_.device();
    const auto stream =
        static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
    const int grid = static_cast<int>(std::min(ready_.size(0), most_blocks));
    kKernel<<<grid, threads, shared_bytes, stream>>>(p);
    const cudaError_t error = cudaGetLastError();
    TVM_FFI_ICHECK_EQ(error, cudaSuccess) << cudaGetErrorString(error);
  }
};

template <typename T, bool kE5M2>
void merge_gemm(tvm::ffi::TensorView upper, tvm::ffi::TensorView lower, tvm::ffi::TensorView x,
                tvm::ffi::TensorView y, tvm::ffi::TensorView partials, tvm::ffi::TensorView ready) {
  MergeGemm<T, kE5M2>(upper, lower, x, y, partials, ready).enqueue();
}

}  // namespace sglang_morph
