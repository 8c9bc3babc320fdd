// Addresses within the shared memory of a block, as descriptors of wgmma hold them: the offset of a byte, and
// kSharedBase more. CuTe asks for them through __cvta_generic_to_shared, which on a GPU is an intrinsic. Included before
// any header of CuTe, and by every unit of a library alike.
#pragma once

#include <cstddef>
#include <cstdint>

#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1

namespace sdpa::simt {

// Where dynamic shared memory starts: behind what the driver keeps of it.
inline constexpr uint32_t kSharedBase = 1024;

// Of a byte of the running block's shared memory. Defined with the instructions that need it: collectives_sm90.hpp.
size_t shared_address(const void *pointer);

}  // namespace sdpa::simt

inline size_t __cvta_generic_to_shared(const void *pointer) { return sdpa::simt::shared_address(pointer); }
