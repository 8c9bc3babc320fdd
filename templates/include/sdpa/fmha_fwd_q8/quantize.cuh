// The first of the two launches: K and V of 64 keys of one head become bytes in the workspace.
//
//   c        the mean of min(64, seqlen_k) evenly spaced keys of the head
//   K̂        bytes of K - c: one scale for the 16 keys 16 i + 4 l + {0, 1, 2, 3} of a block, l = 0 ... 3
//   V̂        bytes of V, transposed: one scale st for each token, or for the 16 tokens that a lane of attention holds,
//            where no token of the block is kFlat times smaller than the largest of its 16
//
// Subtracting c from every key adds the same to all logits of a row, so softmax does not change; softmax_lse gets it
// back. Where tokens have scales of their own, one of zeros takes the smallest st of its block, so that it does not decide
// the block's reference of P; where all are zeros, st is kScaleOfZeros, so that they do not decide the row's. Rows at and
// beyond seqlen_k are zeros, and are not read.
// A CTA has K or V of a block: K in even CTAs, V in odd ones; without V all have K. Thread t has row t / 2 and of its
// columns every second 16, from 16 (t % 2) on.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/sequence.cuh"
#include "sdpa/fmha_fwd_q8/rounding.cuh"

namespace sdpa::fmha_fwd_q8 {

template <class Traits>
struct Quantize {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = QuantizedParams;

  using Block = typename Traits::Block;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kThreads = 2 * kBlock;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kCtasPerSm = 4;
  static constexpr int kRoles = Traits::kQuantizesV ? 2 : 1;
  static constexpr int kRuns = kHeadDim / 32;         // of 16 columns, a thread's own
  static constexpr int kVectors = kHeadDim / 8;       // of a row
  static constexpr int kSampled = 64;                 // keys whose mean is c, at most
  static constexpr int kParts = kThreads / kVectors;  // sums of c that are made side by side
  static constexpr int kPitch = kBlock / 4 + 4;       // words from a column to the next of the transposed tile
  static constexpr int kMeanBytes = (kParts + 1) * kHeadDim * static_cast<int>(sizeof(float));
  static constexpr int kTransposedBytes = kHeadDim * kPitch * static_cast<int>(sizeof(uint32_t));
  static constexpr int kExchangeWords = 8 * kWarps;  // of every warp, a largest and a smallest magnitude of four groups
  static constexpr int kExchangeBytes = kExchangeWords * static_cast<int>(sizeof(uint32_t));
  static constexpr int kSmemBytes = kExchangeBytes + (kMeanBytes > kTransposedBytes ? kMeanBytes : kTransposedBytes);

  SDPA_DEVICE static void run(const Params &params) {
    const int block_idx = Arch::block_idx();
    const int role = kRoles == 1 ? 0 : block_idx % kRoles;
    const int n_block = block_idx / kRoles % params.key_blocks;
    const int head = block_idx / kRoles / params.key_blocks;
    const int bidb = head / params.num_heads_kv, bidh_kv = head % params.num_heads_kv;
    const Sequence sequence = Sequence::make(params, bidb);
    if (n_block * kBlock >= sequence.seqlen_k) return;
    uint32_t *const exchange = reinterpret_cast<uint32_t *>(Arch::dynamic_smem());
    if (role == 0) {
      quantize_k(params, sequence, n_block, bidb, bidh_kv, exchange);
    } else if constexpr (Traits::kQuantizesV) {
      quantize_v(params, sequence, n_block, bidb, bidh_kv, exchange);
    }
  }

 private:
  // Row 0 of the sequence.
  SDPA_DEVICE static const Element *base(const TensorRef &tensor, const Sequence &sequence, int bidb, int bidh_kv) {
    return static_cast<const Element *>(tensor.data) + bidb * tensor.batch_stride + bidh_kv * tensor.head_stride +
           sequence.first_row_k * tensor.row_stride;
  }

  // Counted over all heads of the workspace.
  SDPA_DEVICE static int64_t place(const Params &params, const Sequence &sequence, int n_block, int bidb, int bidh_kv) {
    return params.block(params.head(bidb, bidh_kv), params.first_block(sequence, bidb) + n_block);
  }

  SDPA_DEVICE static int column(int run) { return 32 * run + 16 * (Arch::thread_idx() % 2); }

  // This thread's part of its row: zeros beyond seqlen_k and num_cols.
  SDPA_DEVICE static void load(float (&x)[kRuns][16], const Element *first_row, const TensorRef &tensor, int key,
                               int seqlen_k, int num_cols) {
    const Element *const row = first_row + key * tensor.row_stride;
    CUTE_UNROLL
    for (int i = 0; i < 2 * kRuns; ++i) {
      const int col = column(i / 2) + i % 2 * 8;
      uint4 vector = make_uint4(0, 0, 0, 0);
      if (key < seqlen_k && col < num_cols) vector = *reinterpret_cast<const uint4 *>(row + col);
      widen<Element>(&x[i / 2][i % 2 * 8], vector);
    }
  }

  SDPA_DEVICE static uint32_t largest(const float (&x)[kRuns][16]) {
    uint32_t amax = 0;
    CUTE_UNROLL
    for (int i = 0; i < kRuns * 16; ++i) amax = cute::max(amax, magnitude(x[i / 16][i % 16]));
    return cute::max(amax, Arch::shfl_xor(amax, 1));
  }

  // floor(i · (seqlen_k - 1) / (kSampled - 1)), without a division of 64 bits; all keys of a sequence of fewer.
  SDPA_DEVICE static int sampled_key(int i, int seqlen_k) {
    if (seqlen_k <= kSampled) return i;
    constexpr uint32_t kSteps = kSampled - 1;
    const auto last = static_cast<uint32_t>(seqlen_k - 1), index = static_cast<uint32_t>(i);
    return static_cast<int>(index * (last / kSteps) + index * (last % kSteps) / kSteps);
  }

  // c, to `mean` in shared memory.
  SDPA_DEVICE static void find_mean(const Params &params, const Sequence &sequence, const Element *keys, float *mean,
                                    float *parts) {
    const int tid = Arch::thread_idx();
    const int count = cute::min(sequence.seqlen_k, int{kSampled});
    const int part = tid / kVectors, col = tid % kVectors * 8;
    const float share = 1.f / static_cast<float>(count);
    if (part < kParts) {
      constexpr int kEach = (kSampled + kParts - 1) / kParts, kBatch = cute::min(kEach, 8);
      float sum[8] = {};
      CUTE_UNROLL
      for (int first = 0; first < kEach; first += kBatch) {
        uint4 vectors[kBatch];  // on their way at once
        CUTE_UNROLL
        for (int n = 0; n < kBatch; ++n) {
          const int i = part + (first + n) * kParts;
          vectors[n] = make_uint4(0, 0, 0, 0);
          if (i < count && col < params.head_dim)
            vectors[n] =
                *reinterpret_cast<const uint4 *>(keys + sampled_key(i, sequence.seqlen_k) * params.k.row_stride + col);
        }
        CUTE_UNROLL
        for (int n = 0; n < kBatch; ++n) {
          float x[8];
          widen<Element>(x, vectors[n]);
          CUTE_UNROLL
          for (int e = 0; e < 8; ++e) sum[e] += Arch::multiply(x[e], share);
        }
      }
      CUTE_UNROLL
      for (int e = 0; e < 8; ++e) parts[part * kHeadDim + col + e] = sum[e];
    }
    Arch::syncthreads();  // all parts are in shared memory
    if (tid < kHeadDim) {
      float sum = parts[tid];
      for (int i = 1; i < kParts; ++i) sum += parts[i * kHeadDim + tid];
      mean[tid] = sum;
    }
    Arch::syncthreads();  // `mean` is there
  }

  SDPA_DEVICE static void quantize_k(const Params &params, const Sequence &sequence, int n_block, int bidb, int bidh_kv,
                                     uint32_t *exchange) {
    const int tid = Arch::thread_idx(), lane = tid % 32, warp = tid / 32;
    const int row = tid / 2, key = n_block * kBlock + row;
    float *const mean = reinterpret_cast<float *>(exchange + kExchangeWords);
    const Element *const keys = base(params.k, sequence, bidb, bidh_kv);
    float x[kRuns][16];
    load(x, keys, params.k, key, sequence.seqlen_k, params.head_dim);
    find_mean(params, sequence, keys, mean, mean + kHeadDim);
    if (n_block == 0 && tid < kHeadDim)
      params.k_mean[(int64_t{bidb} * params.num_heads_kv + bidh_kv) * kHeadDim + tid] = mean[tid];
    if (key < sequence.seqlen_k) {
      CUTE_UNROLL
      for (int i = 0; i < kRuns; ++i) {
        CUTE_UNROLL
        for (int e = 0; e < 16; ++e) x[i][e] = minus(x[i][e], mean[column(i) + e]);
      }
    }

    // A warp has 16 rows, of each group the four of eight neighbouring lanes.
    uint32_t amax = largest(x);
    amax = cute::max(amax, Arch::shfl_xor(amax, 2));
    amax = cute::max(amax, Arch::shfl_xor(amax, 4));
    if (lane % 8 == 0) exchange[warp * 4 + lane / 8] = amax;
    Arch::syncthreads();  // every warp's maxima are in shared memory
    const int group = lane / 8;
    CUTE_UNROLL
    for (int w = 0; w < kWarps; ++w) amax = cute::max(amax, exchange[w * 4 + group]);

    const float inverse = inverse_of(amax);
    const int64_t block = place(params, sequence, n_block, bidb, bidh_kv);
    char *const k_hat = params.blocks + block * Block::kBytes;
    const int tile_row = row / 16 * 16 + row / 2 % 2 * 8 + row % 16 / 4 * 2 + row % 2;  // KeyOrder(tile_row) = row
    CUTE_UNROLL
    for (int i = 0; i < kRuns; ++i)
      *reinterpret_cast<uint4 *>(k_hat + (column(i) / Block::kCols * kBlock + tile_row) * Block::kCols +
                                 column(i) % Block::kCols) =
          make_uint4(to_bytes<Arch>(&x[i][0], inverse), to_bytes<Arch>(&x[i][4], inverse),
                     to_bytes<Arch>(&x[i][8], inverse), to_bytes<Arch>(&x[i][12], inverse));
    if (warp == 0 && lane % 8 == 0) params.k_scale[block * 4 + group] = scale_of(amax);
  }

  // Two finite numbers of opposite signs may be further apart than any float.
  SDPA_DEVICE static float minus(float x, float mean) {
    const float difference = x - mean;
    if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
      if (!is_finite(magnitude(difference)) && is_finite(magnitude(x)) && is_finite(magnitude(mean)))
        return copysignf(kLargestFloat, difference);
    }
    return difference;
  }

  SDPA_DEVICE static void quantize_v(const Params &params, const Sequence &sequence, int n_block, int bidb, int bidh_kv,
                                     uint32_t *exchange) {
    const int tid = Arch::thread_idx(), lane = tid % 32, warp = tid / 32;
    const int row = tid / 2, key = n_block * kBlock + row;
    float x[kRuns][16];
    load(x, base(params.v, sequence, bidb, bidh_kv), params.v, key, sequence.seqlen_k, params.head_dim_v);
    const uint32_t amax = largest(x);

    // A warp has 16 rows, of each group the four of eight neighbouring lanes. Tokens of zeros and infinite ones are
    // larger than all, and smaller than none.
    constexpr uint32_t kNone = 0xffffffffu;
    const bool is_counted = !is_zero(amax) && is_finite(amax);
    uint32_t most = is_counted ? amax : kNone, least = most;
    CUTE_UNROLL
    for (int mask = 2; mask < 8; mask *= 2) {
      most = cute::max(most, Arch::shfl_xor(most, mask));
      least = cute::min(least, Arch::shfl_xor(least, mask));
    }
    const int group = lane / 8;
    if (lane % 8 == 0) {
      exchange[warp * 4 + group] = most;
      exchange[(kWarps + warp) * 4 + group] = least;
    }
    Arch::syncthreads();  // every warp's extremes are in shared memory
    bool is_flat = true;
    uint32_t smallest = kNone, of_group = 0;
    CUTE_UNROLL
    for (int g = 0; g < 4; ++g) {
      most = 0;
      least = kNone;
      CUTE_UNROLL
      for (int w = 0; w < kWarps; ++w) {
        most = cute::max(most, exchange[w * 4 + g]);
        least = cute::min(least, exchange[(kWarps + w) * 4 + g]);
      }
      is_flat = is_flat && most != kNone && to_float(most) <= kFlat * to_float(least);
      smallest = cute::min(smallest, least);
      of_group = g == group ? most : of_group;
    }
    const uint32_t of_token = is_flat ? of_group : amax;
    const float of_zeros = smallest == kNone ? kScaleOfZeros : scale_of(smallest);
    const float scale = is_zero(of_token) ? of_zeros : scale_of(of_token);

    char *const block = params.blocks + place(params, sequence, n_block, bidb, bidh_kv) * Block::kBytes;
    if (lane % 2 == 0) {
      reinterpret_cast<float *>(block + Block::kLog2)[row] = Arch::log2(scale);
      reinterpret_cast<float *>(block + Block::kInverse)[row] = (is_flat ? -kInverseUnit : kInverseUnit) / scale;
    }

    // Four bytes of a column a word, four columns a thread: lanes of four neighbouring rows swap.
    uint32_t *const transposed = exchange + kExchangeWords;
    const float inverse = inverse_of(of_token);
    const int in_quad = row % 4;
    CUTE_UNROLL
    for (int i = 0; i < 4 * kRuns; ++i) {
      const uint32_t word = transpose(to_bytes<Arch>(&x[i / 4][i % 4 * 4], inverse), in_quad);
      transposed[(column(i / 4) + i % 4 * 4 + in_quad) * kPitch + row / 4] = word;
    }
    Arch::syncthreads();  // the block is transposed
    CUTE_UNROLL
    for (int i = 0; i < kHeadDim * (kBlock / 16) / kThreads; ++i) {
      const int index = i * kThreads + tid, col = index / (kBlock / 16), piece = index % (kBlock / 16);
      *reinterpret_cast<uint4 *>(block + Block::kV + 16 * index) =
          *reinterpret_cast<const uint4 *>(&transposed[col * kPitch + 4 * piece]);
    }
  }

  // A 4 x 4 matrix of bytes, of which lane 2 in_quad (+ 0 ... 7) holds a row: afterwards it holds a column.
  SDPA_DEVICE static uint32_t transpose(uint32_t word, int in_quad) {
    uint32_t other = Arch::shfl_xor(word, 4);  // in_quad ^ 2
    word = in_quad < 2 ? (word & 0x0000ffffu) | other << 16 : other >> 16 | (word & 0xffff0000u);
    other = Arch::shfl_xor(word, 2);  // in_quad ^ 1
    return in_quad % 2 == 0 ? (word & 0x00ff00ffu) | (other & 0x00ff00ffu) << 8
                            : (other >> 8 & 0x00ff00ffu) | (word & 0xff00ff00u);
  }
};

}  // namespace sdpa::fmha_fwd_q8
