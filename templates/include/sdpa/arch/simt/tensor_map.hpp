// A tensor map of the host target, and the copies of boxes that it describes: what TMA does, at the moment it is told to.
//
// A box of `box[0]` x `box[1]` x ... elements lies in shared memory without gaps, innermost dimension first, and every 16
// bytes go to the place that the swizzle gives them: bits 4 and up of the address are exclusive-ored with bits 7 and up,
// three, two or one of them. Elements outside of the tensor read as zeros and are not written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sdpa/arch/simt/build_kind.hpp"
#include "sdpa/registry.hpp"

namespace sdpa::simt {

inline constexpr int kMaxRank = 5;

struct TensorMap {
  char *address;
  uint64_t extent[kMaxRank];
  uint64_t stride[kMaxRank];  // bytes
  uint32_t box[kMaxRank];
  uint8_t rank;
  uint8_t element_bytes;
  uint8_t swizzle_bytes;  // 32, 64 or 128; 16: not swizzled
};

// Where the 16 bytes at a shared address lie when rows of `swizzle_bytes` are swizzled.
inline uint32_t swizzled(uint32_t address, uint32_t swizzle_bytes) {
  return address ^ (address >> 7 & (swizzle_bytes / 16 - 1)) << 4;
}

inline Status make_tensor_map(TensorMap &map, const char *name, int element_bytes, const void *address, int rank,
                              const uint64_t *extent, const uint64_t *stride_bytes, const uint32_t *box,
                              int swizzle_bytes) {
  const auto refuse = [&](const char *what, int dimension, uint64_t value, const char *allowed) {
    return make_status(SDPA_INVALID_ARGUMENT, "%s: %s %d of the tensor map is %llu; %s", name, what, dimension,
                       static_cast<unsigned long long>(value), allowed);
  };
  if (rank < 1 || rank > kMaxRank)
    return make_status(SDPA_INVALID_ARGUMENT, "%s: a tensor map of %d dimensions; it has 1 to %d", name, rank,
                       kMaxRank);
  if (swizzle_bytes != 32 && swizzle_bytes != 64 && swizzle_bytes != 128)
    return make_status(SDPA_INVALID_ARGUMENT, "%s: a swizzle of %d bytes; it is 32, 64 or 128", name, swizzle_bytes);
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0)
    return make_status(SDPA_INVALID_ARGUMENT, "%s: address %p of the tensor map is not a multiple of 16", name,
                       address);
  if (box[0] * static_cast<uint32_t>(element_bytes) > static_cast<uint32_t>(swizzle_bytes))
    return refuse("box extent", 0, box[0], "a row of a box has at most the bytes of the swizzle");
  map = {};
  map.address = static_cast<char *>(const_cast<void *>(address));
  map.rank = static_cast<uint8_t>(rank);
  map.element_bytes = static_cast<uint8_t>(element_bytes);
  map.swizzle_bytes = static_cast<uint8_t>(swizzle_bytes);
  for (int i = 0; i < kMaxRank; ++i) {
    map.extent[i] = i < rank ? extent[i] : 1;
    map.box[i] = i < rank ? box[i] : 1;
    map.stride[i] = i == 0 ? static_cast<uint64_t>(element_bytes) : i < rank ? stride_bytes[i - 1] : 0;
    if (map.extent[i] < 1 || map.extent[i] > uint64_t{1} << 32)
      return refuse("extent", i, map.extent[i], "it is 1 to 2^32");
    if (map.box[i] < 1 || map.box[i] > 256) return refuse("box extent", i, map.box[i], "it is 1 to 256");
    if (i > 0 && (map.stride[i] % 16 != 0 || map.stride[i] >= uint64_t{1} << 40))
      return refuse("stride", i, map.stride[i], "it is a multiple of 16 below 2^40");
  }
  return {};
}

// What a copy without a map moves: one row.
inline TensorMap bytes_as_they_lie(const void *address, int bytes) {
  TensorMap map = {};
  map.address = static_cast<char *>(const_cast<void *>(address));
  map.rank = map.element_bytes = 1;
  map.swizzle_bytes = 16;
  for (int i = 0; i < kMaxRank; ++i) map.extent[i] = map.box[i] = 1;
  map.extent[0] = map.box[0] = static_cast<uint32_t>(bytes);
  map.stride[0] = 1;
  return map;
}

inline size_t box_bytes(const TensorMap &map) {
  size_t bytes = map.element_bytes;
  for (int i = 0; i < kMaxRank; ++i) bytes *= map.box[i];
  return bytes;
}

// Copies the box at `coordinates` between the tensor and shared memory, where it starts at `smem`, which has the shared
// address `shared`. kIsLoad: from the tensor.
template <bool kIsLoad>
SDPA_SIMT_UNOBSERVED inline void copy_box(const TensorMap &map, const int (&coordinates)[kMaxRank], char *smem,
                                          uint32_t shared) {
  const uint32_t row_bytes = map.box[0] * map.element_bytes;
  const uint32_t rows = static_cast<uint32_t>(box_bytes(map) / row_bytes);
  for (uint32_t row = 0; row < rows; ++row) {
    bool is_inside = true;
    uint64_t offset = 0;  // addresses wrap around
    uint32_t rest = row;
    for (int i = 1; i < kMaxRank; ++i) {
      const int64_t at = int64_t{coordinates[i]} + rest % map.box[i];
      rest /= map.box[i];
      is_inside = is_inside && at >= 0 && at < static_cast<int64_t>(map.extent[i]);
      offset += static_cast<uint64_t>(at) * map.stride[i];
    }
    for (uint32_t element = 0; element < map.box[0]; ++element) {
      const int64_t column = int64_t{coordinates[0]} + element;
      const bool is_element_inside = is_inside && column >= 0 && column < static_cast<int64_t>(map.extent[0]);
      const uint32_t linear = shared + row * row_bytes + element * map.element_bytes;
      const uint32_t place = (swizzled(linear & ~15u, map.swizzle_bytes) | (linear & 15u)) - shared;
      char *const global = reinterpret_cast<char *>(reinterpret_cast<uint64_t>(map.address) + offset +
                                                    static_cast<uint64_t>(column) * map.element_bytes);
      if constexpr (kIsLoad) {
        if (is_element_inside) {
          std::memcpy(smem + place, global, map.element_bytes);
        } else {
          std::memset(smem + place, 0, map.element_bytes);
        }
      } else if (is_element_inside) {
        std::memcpy(global, smem + place, map.element_bytes);
      }
    }
  }
}

}  // namespace sdpa::simt
