// How the results of a CTA's KV groups become one, through shared memory.
//
// All groups work on the same rows, and thread t of each holds the same elements of O. Each group completes a slice of
// the columns: a thread keeps that slice in its registers and hands the other slices over, 16 bytes beside those of its
// neighbours, in the order of the registers. Behind one barrier it adds what the other groups left for its slice:
//
//   row_max = max_g row_max_g     row_sum = Σ_g exp2(row_max_g - row_max) row_sum_g
//   O = Σ_g exp2(row_max_g - row_max) O_g     g from the thread's own group on, cyclically
//
// Row sums are a lane's own until they cross the quad: before the barrier, where the shuffles of one warp hide under
// the others, or with one warp a group at the very end.
//
// The only group of a split kernel has nothing to merge: its slice is all of O, which stays where it is.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/fmha_fwd/mainloop.cuh"

namespace sdpa::fmha_fwd {

// What one thread holds afterwards: kRowsPerThread rows of the tile, two columns of every MMA tile of its group's slice.
template <class Traits>
struct GroupMerge {
  using Arch = typename Traits::Arch;
  using SoftmaxState = Softmax<Arch, Traits::kRowsPerThread>;

  static constexpr int kGroups = Traits::kKvGroups;
  static constexpr int kTiles = Traits::kHeadDim / 8 / kGroups;  // MMA tiles, of 8 columns, in a slice
  static constexpr int kUnits = Traits::kMmaM * kTiles;
  static constexpr bool kSumsFirst = Traits::kGroupThreads > 32;

  const int group = Arch::thread_idx() / Traits::kGroupThreads;
  const int tid = Arch::thread_idx() % Traits::kGroupThreads;  // in the group
  float row_max[Traits::kRowsPerThread];
  float row_sum[Traits::kRowsPerThread];
  float4 out[kUnits];  // [m * kTiles + t]: row 2m in x and y, row 2m + 1 in z and w, of tile t of the slice

  // tOrO ((2, 2), MMA_M, MMA_K) of this thread's group; all threads of the CTA call.
  template <class Accumulator>
  SDPA_DEVICE GroupMerge(char *smem, const Accumulator &tOrO, const SoftmaxState &softmax) {
    if constexpr (kGroups == 1) {
      keep(tOrO, softmax);
    } else {
      sync_kv_group<Traits>(group);  // the group has read its last V: its room may take what it hands over
      hand_over(room_of(smem, group), tOrO, softmax);
      Arch::syncthreads();  // all slices are in shared memory
      complete(smem);
    }
  }

  // The tile's row that is row i of this thread, 0 <= i < kRowsPerThread.
  SDPA_DEVICE int row(int i) const { return (i / 2 * Traits::kWarpsM + tid / 32) * 16 + i % 2 * 8 + tid % 32 / 4; }
  // The first column of tile t of the slice, and of this thread's two.
  SDPA_DEVICE int tile_col(int t) const { return (group * kTiles + t) * 8; }
  SDPA_DEVICE int col(int t) const { return tile_col(t) + tid % 4 * 2; }

  // Row i of this thread becomes one that saw no key, also where it is NaN.
  SDPA_DEVICE void clear(int i) {
    row_sum[i] = 0.f;
    CUTE_UNROLL
    for (int u = i / 2 * kTiles; u < (i / 2 + 1) * kTiles; ++u) {
      if (i % 2 == 0) {
        out[u].x = out[u].y = 0.f;
      } else {
        out[u].z = out[u].w = 0.f;
      }
    }
  }

 private:
  // A group's room, for this thread: float4 O [kGroups slices][kUnits][kGroupThreads], (row_max, row_sum) of two rows
  // [kMmaM][kGroupThreads].
  static constexpr int kStats = kGroups * kUnits * Traits::kGroupThreads;
  static_assert(16 * (kStats + Traits::kMmaM * Traits::kGroupThreads) == Traits::kMergeBytes);
  SDPA_DEVICE float4 *room_of(char *smem, int of_group) const {
    return reinterpret_cast<float4 *>(smem + of_group * Traits::kGroupBytes) + tid;
  }

  template <class Accumulator>
  SDPA_DEVICE void keep(const Accumulator &tOrO, const SoftmaxState &softmax) {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsPerThread; ++i) {
      row_max[i] = softmax.row_max[i];
      row_sum[i] = SoftmaxState::across_quad(softmax.row_sum[i]);
    }
    CUTE_UNROLL
    for (int u = 0; u < kUnits; ++u) {
      const int m = u / kTiles, n = u % kTiles;
      out[u] = make_float4(tOrO(0, m, n), tOrO(1, m, n), tOrO(2, m, n), tOrO(3, m, n));
    }
  }

  template <class Accumulator>
  SDPA_DEVICE void hand_over(float4 *room, const Accumulator &tOrO, const SoftmaxState &softmax) {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsPerThread; ++i) {
      row_max[i] = softmax.row_max[i];
      row_sum[i] = kSumsFirst ? SoftmaxState::across_quad(softmax.row_sum[i]) : softmax.row_sum[i];
    }
    CUTE_UNROLL
    for (int m = 0; m < Traits::kMmaM; ++m)
      room[kStats + m * Traits::kGroupThreads] =
          make_float4(row_max[2 * m], row_max[2 * m + 1], row_sum[2 * m], row_sum[2 * m + 1]);
    CUTE_UNROLL
    for (int slice = 0; slice < kGroups; ++slice) {
      CUTE_UNROLL
      for (int u = 0; u < kUnits; ++u) {
        const int m = u / kTiles, n = slice * kTiles + u % kTiles;
        const float4 unit = make_float4(tOrO(0, m, n), tOrO(1, m, n), tOrO(2, m, n), tOrO(3, m, n));
        if (slice == group) {
          out[u] = unit;
        } else {
          room[(slice * kUnits + u) * Traits::kGroupThreads] = unit;
        }
      }
    }
  }

  SDPA_DEVICE void complete(char *smem) {
    const float4 *rooms[kGroups];
    CUTE_UNROLL
    for (int g = 1; g < kGroups; ++g) rooms[g] = room_of(smem, (group + g) % kGroups);
    CUTE_UNROLL
    for (int m = 0; m < Traits::kMmaM; ++m) {
      float4 stats[kGroups];
      stats[0] = make_float4(row_max[2 * m], row_max[2 * m + 1], row_sum[2 * m], row_sum[2 * m + 1]);
      float max[2] = {row_max[2 * m], row_max[2 * m + 1]};
      CUTE_UNROLL
      for (int g = 1; g < kGroups; ++g) {
        stats[g] = rooms[g][kStats + m * Traits::kGroupThreads];
        max[0] = fmaxf(max[0], stats[g].x);
        max[1] = fmaxf(max[1], stats[g].y);
      }
      float sum[2] = {0.f, 0.f};
      CUTE_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        const float weight[2] = {Arch::exp2(stats[g].x - max[0]), Arch::exp2(stats[g].y - max[1])};
        sum[0] += weight[0] * stats[g].z;
        sum[1] += weight[1] * stats[g].w;
        CUTE_UNROLL
        for (int u = m * kTiles; u < (m + 1) * kTiles; ++u) {
          if (g == 0) {
            out[u] =
                make_float4(weight[0] * out[u].x, weight[0] * out[u].y, weight[1] * out[u].z, weight[1] * out[u].w);
          } else {
            const float4 unit = rooms[g][(group * kUnits + u) * Traits::kGroupThreads];
            out[u].x += weight[0] * unit.x;
            out[u].y += weight[0] * unit.y;
            out[u].z += weight[1] * unit.z;
            out[u].w += weight[1] * unit.w;
          }
        }
      }
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        row_max[2 * m + r] = max[r];
        row_sum[2 * m + r] = kSumsFirst ? sum[r] : SoftmaxState::across_quad(sum[r]);
      }
    }
  }
};

}  // namespace sdpa::fmha_fwd
