// How one registry tile (block_m x block_n, stages, warps) becomes the tiles of the two GEMMs:
//
//   S = Q Kᵀ   [seqlen_q, seqlen_k], depth head_dim:  block_m x block_n x 32
//   O = P V    [seqlen_q, head_dim], depth seqlen_k:  min(block_m, 128) x n x 32 or 64, n = 32, 64 or 128
//
// head_dim is a run-time depth of the first GEMM and the width of the second, so head dims share the first and mostly
// share the second. Widths 80 and 96 use n = 128: the multiplications that this wastes cost less than reading P again
// for every narrower column of tiles. Plain C++: the host library reports the same numbers without compiling a GEMM.
#pragma once

namespace sdpa::unfused {

struct GemmTile {
  int block_m;
  int block_n;
  int block_k;
  int stages;
  int warps_m;
  int warps_n;

  constexpr int warps() const { return warps_m * warps_n; }
  constexpr int stage_bytes() const { return (block_m + block_n) * block_k * 2; }
  constexpr int smem_bytes() const { return stages * stage_bytes(); }
};

// Warps are laid out so that a warp's tile is as square as it gets: it then reads least shared memory per product.
constexpr GemmTile make_gemm_tile(int block_m, int block_n, int block_k, int stages, int warps) {
  int warps_m = warps;
  int warps_n = 1;
  while (warps_m > 1 && block_m / warps_m < block_n / warps_n) {
    warps_m /= 2;
    warps_n *= 2;
  }
  return {block_m, block_n, block_k, stages, warps_m, warps_n};
}

constexpr GemmTile qk_tile(int block_m, int block_n, int stages, int warps) {
  return make_gemm_tile(block_m, block_n, 32, stages, warps);
}

// The second GEMM's loop is long and bound by streaming P: it takes as many stages as leave room for two CTAs on an
// SM of 100 KiB, and a deeper step where the tile is small. A warp gets at least 32 x 32 outputs.
constexpr GemmTile pv_tile(int block_m, int n, int warps) {
  const int m = block_m < 128 ? block_m : 128;
  const int k = m <= 64 && n <= 64 ? 64 : 32;
  const int stages = 48 * 1024 / ((m + n) * k * 2);
  const int most_warps = m * n / 1024;
  return make_gemm_tile(m, n, k, stages < 3 ? 3 : stages, warps < most_warps ? warps : most_warps);
}

// The widest second GEMM that a head_dim needs. Small grids get narrower ones (pipeline.cuh).
constexpr int widest_pv_n(int head_dim) { return head_dim <= 32 ? 32 : head_dim <= 64 ? 64 : 128; }

constexpr int smem_bytes(int head_dim, int block_m, int block_n, int stages, int warps) {
  int most = qk_tile(block_m, block_n, stages, warps).smem_bytes();
  for (int n = 32; n <= widest_pv_n(head_dim); n *= 2) {
    const int bytes = pv_tile(block_m, n, warps).smem_bytes();
    most = bytes > most ? bytes : most;
  }
  return most;
}

}  // namespace sdpa::unfused
