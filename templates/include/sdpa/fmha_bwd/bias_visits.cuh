// Which pairs of tiles add to one tile of a bias's gradient, and in which order: batches, in them heads, in them blocks of
// rows, in them blocks of keys. What the bias has itself is one of each; what it is broadcast over, all. Pairs of which no
// row sees a key are passed over.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/key_range.cuh"
#include "sdpa/attention/sequence.cuh"
#include "sdpa/fmha_bwd/params.hpp"

namespace sdpa::fmha_bwd {

// What the launch that makes the gradient of a bias receives. A stride is 0 where dbias is summed over; in parts
// (bias_parts.cuh), it is the workspace, and they are its batches.
struct BiasParams : Params {
  void *dbias;
  int64_t dbias_stride[4];  // batch, head, row, key; elements
  MaskType dbias_type;
  int32_t has_dbias_pairs;  // keys are neighbours, and every second one starts a vector of two elements of 16 bits
  int32_t batch;
  int32_t batches;  // that a CTA sums over: the last one may have fewer
  int32_t sums_heads;
  int32_t sums_rows;
  int32_t sums_keys;
  int32_t num_m_blocks;  // of the problem
  int32_t num_n_blocks;
  cutlass::FastDivmod m_blocks;  // of dbias: 1 where rows are summed over
  cutlass::FastDivmod n_blocks;
  cutlass::FastDivmod heads;
};

// A pair of tiles, or a tile of dbias: 0 in what is summed over, and the part for the batch.
struct Place {
  int bidb;
  int bidh;
  int m_block;
  int n_block;
};

template <class Traits>
struct Visits {
  const BiasParams &params;
  Place first;
  Place end;
  Place place;  // the one at hand

  SDPA_DEVICE Visits(const BiasParams &params_, const Place &owned) : params(params_), first(owned) {
    first.bidb = owned.bidb * params.batches;
    end.bidb = cute::min(first.bidb + params.batches, params.batch);
    end.bidh = params.sums_heads ? params.num_heads_q : owned.bidh + 1;
    end.m_block = params.sums_rows ? params.num_m_blocks : owned.m_block + 1;
    end.n_block = params.sums_keys ? params.num_n_blocks : owned.n_block + 1;
    place = first;
    if (!is_seen()) next();
  }

  SDPA_DEVICE bool is_done() const { return place.bidb >= end.bidb; }

  // To the next pair with a row that sees a key, or to the end.
  SDPA_DEVICE void next() {
    do {
      step();
    } while (!is_done() && !is_seen());
  }

  // Whether some row of the pair does not see some key of it, or there is none.
  SDPA_DEVICE bool needs_mask(const Place &at, const Sequence &sequence) const {
    const KeyRange keys = KeyRange::make<Traits>(params, sequence, at.m_block);
    return at.n_block < keys.n_block_full_min || at.n_block >= keys.n_block_full ||
           (at.m_block + 1) * Traits::kBlockM > sequence.seqlen_q;
  }

 private:
  SDPA_DEVICE void step() {
    if (++place.n_block < end.n_block) return;
    place.n_block = first.n_block;
    if (++place.m_block < end.m_block) return;
    place.m_block = first.m_block;
    if (++place.bidh < end.bidh) return;
    place.bidh = first.bidh;
    ++place.bidb;
  }

  SDPA_DEVICE bool is_seen() const {
    const Sequence sequence = Sequence::make(params, place.bidb);
    if (place.m_block * Traits::kBlockM >= sequence.seqlen_q) return false;
    const KeyRange keys = KeyRange::make<Traits>(params, sequence, place.m_block);
    return place.n_block >= keys.n_block_min && place.n_block < keys.n_block_max;
  }
};

}  // namespace sdpa::fmha_bwd
