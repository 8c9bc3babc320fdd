// What every family asks of a tensor before it launches anything. A refusal names the tensor, what it was and what is
// allowed. What a family asks of sizes is in its can_implement.
#pragma once

#include <cstdint>

#include "sdpa/registry.hpp"

namespace sdpa {

inline constexpr int kVectorBytes = 16;                   // what loads and stores move at a time
inline constexpr int kVectorElements = kVectorBytes / 2;  // of a 16-bit type

// Strides are in elements; that of an axis of extent 1 may be anything.
inline Status check_tensor(const char *name, const void *data, const int64_t (&stride)[3], const int (&extent)[3]) {
  if (reinterpret_cast<uintptr_t>(data) % kVectorBytes != 0)
    return make_status(SDPA_INVALID_ARGUMENT, "%s: address %p must be a multiple of %d bytes", name, data,
                       kVectorBytes);
  static const char *const kAxis[3] = {"batch", "head", "row"};
  for (int i = 0; i < 3; ++i) {
    if (extent[i] > 1 && stride[i] % kVectorElements != 0)
      return make_status(SDPA_INVALID_ARGUMENT, "%s: %s stride %lld must be a multiple of %d elements", name, kAxis[i],
                         static_cast<long long>(stride[i]), kVectorElements);
  }
  return {};
}

}  // namespace sdpa
