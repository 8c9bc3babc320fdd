// A loop whose index is a compile-time constant and whose body is always inlined. cute::for_each is neither once a body
// is used at several places: the compiler then makes a function of it, and what it touches goes to local memory.
#pragma once

#include <utility>

#include <cute/numeric/integral_constant.hpp>

#include "sdpa/arch/target.hpp"

namespace sdpa::arch {

template <int... kIndices, class Body>
SDPA_DEVICE void static_for(std::integer_sequence<int, kIndices...>, Body &&body) {
  (body(cute::Int<kIndices>{}), ...);
}

// body(Int<0>), ..., body(Int<kCount - 1>). The body is a lambda marked SDPA_INLINE_LAMBDA.
template <int kCount, class Body>
SDPA_DEVICE void static_for(Body &&body) {
  static_for(std::make_integer_sequence<int, kCount>{}, body);
}

}  // namespace sdpa::arch
