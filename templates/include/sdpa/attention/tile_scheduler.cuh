// Which tile a CTA computes: linear block index → (m_block, bidh, bidb).
//
// Full attention: the m_blocks of one head follow each other, so K and V of that head are read from L2, and SMs that
// stand together read the same of them at once. Causal: the cost of a tile grows with m_block, so the longest tiles start
// first; to keep K and V in L2 all the same, heads are taken in sections whose K and V fit there, longest tile first
// within a section. Where all CTAs start together (kernels with KV groups), runs of kRun tiles of one head follow each
// other, for the sake of those SMs. A mask that batches share makes batches follow each other within a head, so that it
// is read from L2 as well.
#pragma once

#include <cstdint>

#include <cutlass/fast_math.h>

#include "sdpa/arch/target.hpp"

namespace sdpa {

struct WorkTile {
  int m_block;
  int bidh;     // query head
  int bidh_kv;  // key and value head
  int bidb;
};

enum class CausalOrder { kLongestFirst, kInRuns };

struct TileScheduler {
  int num_m_blocks;
  int num_full_sections;
  int takes_batches_first;
  cutlass::FastDivmod m_blocks;        // by num_m_blocks
  cutlass::FastDivmod section_tiles;   // by heads_per_section * num_m_blocks
  cutlass::FastDivmod section_heads;   // by heads_per_section
  cutlass::FastDivmod last_heads;      // by the heads of the last, shorter section
  cutlass::FastDivmod heads_q;         // by num_heads_q, or by batch
  cutlass::FastDivmod heads_q_per_kv;  // by num_heads_q / num_heads_kv

  static constexpr unsigned kRun = 8;

  // An NVIDIA L4's: of the sm_89 cards that README.md names, the one with the smaller L2 (an RTX 4090 has 72 MB).
  static constexpr int64_t kL2Bytes = 48 << 20;
  // What a section's K and V may take of it, so that Q, O and other sections leave them alone.
  static constexpr int64_t kL2Budget = kL2Bytes / 2;

  static TileScheduler make(int num_m_blocks, int batch, int num_heads_q, int num_heads_kv, int64_t kv_bytes_per_head) {
    const int64_t heads = static_cast<int64_t>(batch) * num_heads_q;
    const int64_t ratio = num_heads_q / num_heads_kv;
    int64_t fitting = kL2Budget / (kv_bytes_per_head > 0 ? kv_bytes_per_head : 1) * ratio;
    const int64_t per_section = fitting < 1 ? 1 : fitting > heads ? heads : fitting;
    const int64_t last = heads % per_section;
    TileScheduler s;
    s.num_m_blocks = num_m_blocks;
    s.takes_batches_first = 0;
    s.num_full_sections = static_cast<int>(heads / per_section);
    s.m_blocks = cutlass::FastDivmod(num_m_blocks);
    s.section_tiles = cutlass::FastDivmod(static_cast<int>(per_section * num_m_blocks));
    s.section_heads = cutlass::FastDivmod(static_cast<int>(per_section));
    s.last_heads = cutlass::FastDivmod(static_cast<int>(last > 0 ? last : 1));
    s.heads_q = cutlass::FastDivmod(num_heads_q);
    s.heads_q_per_kv = cutlass::FastDivmod(static_cast<int>(ratio));
    return s;
  }

  // The batches of one head follow each other, instead of the heads of one batch: for what is shared by batches.
  void take_batches_first(int batch) {
    heads_q = cutlass::FastDivmod(batch);
    takes_batches_first = 1;
  }

  template <bool kIsCausal, bool kMayTakeBatchesFirst, CausalOrder kOrder>
  SDPA_DEVICE WorkTile tile(int block_idx) const {
    int m_block, head;  // head counts over batch and query heads
    if constexpr (kIsCausal) {
      int section, in_section, from_longest, in_row;
      section_tiles(section, in_section, block_idx);
      const bool is_full_section = section < num_full_sections;
      if constexpr (kOrder == CausalOrder::kInRuns) {
        in_runs(from_longest, in_row, in_section, is_full_section);
      } else {
        in_turn(from_longest, in_row, in_section, is_full_section);
      }
      m_block = num_m_blocks - 1 - from_longest;
      head = section * section_heads.divisor + in_row;
    } else {
      m_blocks(head, m_block, block_idx);
    }
    WorkTile t;
    t.m_block = m_block;
    if (kMayTakeBatchesFirst && takes_batches_first) {
      heads_q(t.bidh, t.bidb, head);
    } else {
      heads_q(t.bidb, t.bidh, head);
    }
    t.bidh_kv = heads_q_per_kv.div(t.bidh);
    return t;
  }

 private:
  // One of every head of the section, then the next of every head.
  SDPA_DEVICE void in_turn(int &which, int &head, int index, bool is_full_section) const {
    if (is_full_section) {
      section_heads(which, head, index);
    } else {
      last_heads(which, head, index);
    }
  }

  // The same with runs of tiles; those beyond the last whole run are single again.
  SDPA_DEVICE void in_runs(int &from_longest, int &in_row, int in_section, bool is_full_section) const {
    const int in_whole_runs = static_cast<int>(static_cast<unsigned>(num_m_blocks) / kRun * kRun);
    const int heads = is_full_section ? section_heads.divisor : last_heads.divisor;
    if (in_section < in_whole_runs * heads) {
      int run;
      in_turn(run, in_row, static_cast<int>(static_cast<unsigned>(in_section) / kRun), is_full_section);
      from_longest = static_cast<int>(run * kRun + static_cast<unsigned>(in_section) % kRun);
    } else {
      in_turn(from_longest, in_row, in_section - in_whole_runs * heads, is_full_section);
      from_longest += in_whole_runs;
    }
  }
};

}  // namespace sdpa
