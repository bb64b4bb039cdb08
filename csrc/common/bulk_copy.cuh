// The copy engine of an SM (sm_90 and later): bulk copies between global and shared memory that complete on a barrier.
#pragma once

#include <cstdint>

namespace moe_ep {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same, which the compiler keeps where it would otherwise find it out again, from the number of the block, for
// every access.
__device__ inline uint32_t kept_shared_address(const void* pointer) {
  uint32_t address;
  asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(shared_address(pointer)));
  return address;
}

__device__ inline uint4 load_shared_16(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ inline void init_barrier(uint64_t* barrier, uint32_t num_arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals) : "memory");
}

__device__ inline void arrive(uint64_t* barrier, uint32_t count = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Makes initialised barriers and ordinary accesses known to the copy engine, and what it wrote known to readers.
__device__ inline void fence_copy_engine() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Arrives, and says how many bytes will come besides.
__device__ inline void expect_bytes(uint64_t* barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes)
               : "memory");
}

// Bytes that `barrier` expects.
__device__ inline void load_expected(void* shared, const void* global, uint32_t num_bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(num_bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ inline void load_bulk(void* shared, const void* global, uint32_t num_bytes, uint64_t* barrier) {
  expect_bytes(barrier, num_bytes);
  load_expected(shared, global, num_bytes, barrier);
}

// The limit lets the thread sleep as long as it takes, within it, rather than poll; it ends nothing.
__device__ inline void wait_barrier(uint64_t* barrier, uint32_t parity) {
  constexpr uint32_t kSleepNs = 1000 * 1000;
  asm volatile(
      "{\n\t"
      ".reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n\t"
      "@!done bra again;\n\t"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity), "r"(kSleepNs)
      : "memory");
}

// Whether that wait would end at once.
__device__ inline bool test_barrier(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n\t"
      ".reg .pred done;\n\t"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, done;\n\t"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ inline void store_bulk(void* global, const void* shared, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(num_bytes)
               : "memory");
}

__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most kPending groups of this thread still read shared memory.
template <int kPending>
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Until all groups of this thread are written.
__device__ inline void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

#endif

}  // namespace moe_ep
