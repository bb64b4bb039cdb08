#include "fp8/products.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "common/check.h"

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#endif

#if defined(CUBLAS_VERSION) && CUBLAS_VERSION >= 120900
#define MOE_EP_HAS_PRODUCTS 1
#endif

namespace moe_ep {

#ifdef MOE_EP_HAS_PRODUCTS
namespace {

#define MOE_EP_TEXT_OF(value) #value
#define MOE_EP_TEXT(value) MOE_EP_TEXT_OF(value)
constexpr const char* kLibrary = "libcublasLt.so." MOE_EP_TEXT(CUBLAS_VER_MAJOR);

// The functions that are used, or why they are not there.
class Library {
 public:
  Library() {
    void* const library = dlopen(kLibrary, RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) {
      const char* const why = dlerror();
      obstacle = std::string(kLibrary) + " does not load (" + (why == nullptr ? "no reason given" : why) + ")";
      return;
    }
    find(library, "cublasLtCreate", create);
    find(library, "cublasLtDestroy", destroy);
    find(library, "cublasLtMatmul", matmul);
    find(library, "cublasLtMatmulAlgoGetHeuristic", get_heuristic);
    find(library, "cublasLtMatmulDescInit_internal", init_desc);
    find(library, "cublasLtMatmulDescSetAttribute", set_desc);
    find(library, "cublasLtMatrixLayoutInit_internal", init_layout);
    find(library, "cublasLtMatmulPreferenceInit_internal", init_preference);
    find(library, "cublasLtMatmulPreferenceSetAttribute", set_preference);
  }

  std::string obstacle;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic = nullptr;
  decltype(&cublasLtMatmulDescInit_internal) init_desc = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) set_desc = nullptr;
  decltype(&cublasLtMatrixLayoutInit_internal) init_layout = nullptr;
  decltype(&cublasLtMatmulPreferenceInit_internal) init_preference = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference = nullptr;

 private:
  template <typename Function>
  void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) {
      obstacle = std::string(kLibrary) + " has no " + name;
    }
  }
};

const Library& library() {
  static const Library loaded;
  return loaded;
}

void check_blas(cublasStatus_t status, const char* what) {
  MOE_EP_CHECK(status == CUBLAS_STATUS_SUCCESS, "fp8_products: ", what, " failed with status ",
               static_cast<int>(status), " of cuBLASLt: set moe.fp8.gemm to te.");
}

cublasLtMatmulMatrixScale_t scale_mode(Fp8Scaling scaling) {
  switch (scaling) {
    case Fp8Scaling::kRows:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case Fp8Scaling::kTiles:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    case Fp8Scaling::kTensor:
      break;
  }
  return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}

cudaDataType_t type_of(RowType type) {
  switch (type) {
    case RowType::kBFloat16:
      return CUDA_R_16BF;
    case RowType::kFloat16:
      return CUDA_R_16F;
    case RowType::kFloat32:
      break;
  }
  return CUDA_R_32F;
}

cudaDataType_t type_of(Fp8Operand operand) { return operand.is_e5m2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3; }

}  // namespace

class Fp8Products::Impl {
 public:
  Impl(const std::vector<void*>& workspaces, size_t workspace_bytes)
      : workspaces_(workspaces), workspace_bytes_(workspace_bytes) {
    MOE_EP_CHECK(library().obstacle.empty(), "fp8_products: ", library().obstacle, ": set moe.fp8.gemm to te.");
    MOE_EP_CHECK(workspaces.size() == kStreams, "fp8_products: there are ", workspaces.size(), " workspaces, but ",
                 kStreams, " are needed: give one a stream.");
    check_blas(library().create(&handle_), "making a handle");
    check_blas(library().init_preference(&preference_, sizeof(preference_)), "making a preference");
    check_blas(library().set_preference(&preference_, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes_,
                                        sizeof(workspace_bytes_)),
               "the workspace");
    check_cuda(cudaEventCreateWithFlags(&begun_, cudaEventDisableTiming), "fp8_products: an event");
    for (int i = 0; i < kStreams; ++i) {
      check_cuda(cudaStreamCreateWithFlags(&streams_[i], cudaStreamNonBlocking), "fp8_products: a stream");
      check_cuda(cudaEventCreateWithFlags(&done_[i], cudaEventDisableTiming), "fp8_products: an event");
    }
  }

  // Streams and events stay: this lives as long as the process, whose end may come after the driver's.
  ~Impl() { library().destroy(handle_); }

  void multiply(const std::vector<Fp8Product>& products, Fp8Operand a, Fp8Operand b, RowType type,
                cudaStream_t stream) {
    const std::lock_guard<std::mutex> alone(mutex_);
    cublasLtMatmulDescOpaque_t desc = describe(a, b);
    const int used = std::min(kStreams, static_cast<int>(products.size()));
    check_cuda(cudaEventRecord(begun_, stream), "fp8_products: an event");
    for (int i = 0; i < used; ++i) {
      check_cuda(cudaStreamWaitEvent(streams_[i], begun_, 0), "fp8_products: a wait");
    }
    for (size_t i = 0; i < products.size(); ++i) {
      one(products[i], a, b, type, desc, static_cast<int>(i % kStreams));
    }
    for (int i = 0; i < used; ++i) {
      check_cuda(cudaEventRecord(done_[i], streams_[i]), "fp8_products: an event");
      check_cuda(cudaStreamWaitEvent(stream, done_[i], 0), "fp8_products: a wait");
    }
  }

 private:
  using Key = std::array<int64_t, 5>;  // m, n, k, and what else the choice depends on

  template <typename Value>
  void set(cublasLtMatmulDescOpaque_t& desc, cublasLtMatmulDescAttributes_t attribute, const Value& value) const {
    check_blas(library().set_desc(&desc, attribute, &value, sizeof(value)), "describing a product");
  }

  // cuBLASLt counts columns first: of its operands a is transposed, b and out are as they lie.
  cublasLtMatmulDescOpaque_t describe(Fp8Operand a, Fp8Operand b) const {
    cublasLtMatmulDescOpaque_t desc;
    check_blas(library().init_desc(&desc, sizeof(desc), CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
    set(desc, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(desc, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    set(desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{0});
    set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(a.scaling));
    set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(b.scaling));
    return desc;
  }

  static cublasLtMatrixLayoutOpaque_t layout(cudaDataType_t type, int64_t rows, int64_t cols) {
    cublasLtMatrixLayoutOpaque_t made;
    check_blas(library().init_layout(&made, sizeof(made), type, static_cast<uint64_t>(rows),
                                     static_cast<uint64_t>(cols), rows),
               "describing a matrix");
    return made;
  }

  // Bytes that all addresses are multiples of, at most 256.
  static uint32_t alignment_of(const Fp8Product& product) {
    const uintptr_t all = reinterpret_cast<uintptr_t>(product.a) | reinterpret_cast<uintptr_t>(product.b) |
                          reinterpret_cast<uintptr_t>(product.out) | 256;
    return static_cast<uint32_t>(all & (~all + 1));
  }

  void one(const Fp8Product& product, Fp8Operand a, Fp8Operand b, RowType type, cublasLtMatmulDescOpaque_t& desc,
           int at) {
    set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, product.a_scales);
    set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, product.b_scales);
    cublasLtMatrixLayoutOpaque_t a_layout = layout(type_of(a), product.k, product.m);
    cublasLtMatrixLayoutOpaque_t b_layout = layout(type_of(b), product.k, product.n);
    cublasLtMatrixLayoutOpaque_t out_layout = layout(type_of(type), product.m, product.n);
    const int64_t kind = static_cast<int64_t>(a.scaling) + 4 * static_cast<int64_t>(b.scaling) + 16 * a.is_e5m2 +
                         32 * b.is_e5m2 + 64 * static_cast<int64_t>(type);
    const uint32_t alignment = alignment_of(product);
    const Key key = {product.m, product.n, product.k, kind, alignment};
    auto found = algos_.find(key);
    if (found == algos_.end()) {
      for (const auto attribute :
           {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
        check_blas(library().set_preference(&preference_, attribute, &alignment, sizeof(alignment)), "the alignment");
      }
      cublasLtMatmulHeuristicResult_t result = {};
      int num_results = 0;
      check_blas(library().get_heuristic(handle_, &desc, &a_layout, &b_layout, &out_layout, &out_layout, &preference_,
                                         1, &result, &num_results),
                 "choosing an algorithm");
      MOE_EP_CHECK(num_results == 1, "fp8_products: cuBLASLt has no algorithm for m = ", product.m, ", n = ", product.n,
                   ", k = ", product.k, ": set moe.fp8.gemm to te.");
      found = algos_.emplace(key, result.algo).first;
    }
    const float alpha = 1.0f, beta = 0.0f;
    check_blas(library().matmul(handle_, &desc, &alpha, product.a, &a_layout, product.b, &b_layout, &beta, product.out,
                                &out_layout, product.out, &out_layout, &found->second, workspaces_[at],
                                workspace_bytes_, streams_[at]),
               "a product");
  }

  std::mutex mutex_;
  std::vector<void*> workspaces_;
  size_t workspace_bytes_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulPreferenceOpaque_t preference_;
  std::array<cudaStream_t, kStreams> streams_ = {};
  std::array<cudaEvent_t, kStreams> done_ = {};
  cudaEvent_t begun_ = nullptr;
  std::map<Key, cublasLtMatmulAlgo_t> algos_;
};

std::string fp8_products_obstacle() { return library().obstacle; }

#else

class Fp8Products::Impl {
 public:
  Impl(const std::vector<void*>&, size_t) { fail("fp8_products: ", fp8_products_obstacle(), "."); }
  void multiply(const std::vector<Fp8Product>&, Fp8Operand, Fp8Operand, RowType, cudaStream_t) {}
};

std::string fp8_products_obstacle() { return "moe_ep._C was built without cublasLt.h of CUDA 12.9 or newer"; }

#endif

Fp8Products::Fp8Products(const std::vector<void*>& workspaces, size_t workspace_bytes)
    : impl_(std::make_unique<Impl>(workspaces, workspace_bytes)) {}

Fp8Products::~Fp8Products() = default;

void Fp8Products::multiply(const std::vector<Fp8Product>& products, Fp8Operand a, Fp8Operand b, RowType type,
                           cudaStream_t stream) {
  impl_->multiply(products, a, b, type, stream);
}

}  // namespace moe_ep
