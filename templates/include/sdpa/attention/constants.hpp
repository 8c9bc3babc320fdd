// Between natural units, in which scores, biases and softmax_lse are, and those of exp2.
#pragma once

namespace sdpa {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

}  // namespace sdpa
