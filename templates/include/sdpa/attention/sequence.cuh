// The lengths of the one sequence that a CTA works on. In a plain kernel they are the launch's own; in a general one
// they may come from device memory, and are cut to the sizes of the tensors, so that no length leads beyond them.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/params.hpp"

namespace sdpa {

struct Sequence {
  int seqlen_q;         // rows that attend
  int num_rows;         // rows of out: those from seqlen_q on become 0 and -inf
  int seqlen_k;         // keys that at least one row sees
  int causal_offset;    // key j is seen by row i when j <= i + causal_offset
  int window_offset;    // and j >= i + window_offset; general kernels alone read it
  int64_t first_row_q;  // where the sequence starts in packed tensors
  int64_t first_row_k;

  SDPA_DEVICE static Sequence make(const Params &params, int /*bidb*/) {
    return {params.seqlen_q, params.seqlen_q, params.seqlen_k, params.causal_offset, 0, 0, 0};
  }

  SDPA_DEVICE static Sequence make(const GeneralParams &params, int bidb) {
    Sequence s;
    s.num_rows = params.seqlen_q;
    int num_keys = params.seqlen_k;
    s.first_row_q = first_row(params.lengths_q, bidb, s.num_rows);
    s.first_row_k = first_row(params.lengths_k, bidb, num_keys);
    s.seqlen_q = used(params.lengths_q, bidb, s.num_rows);
    s.seqlen_k = used(params.lengths_k, bidb, num_keys);
    const int offset = params.is_bottom_right ? s.seqlen_k - s.seqlen_q : params.causal_offset;
    s.window_offset = params.window_left < 0 ? -s.seqlen_q : s.within(int64_t{offset} - params.window_left);
    s.causal_offset = params.window_right < 0 ? s.seqlen_k : s.within(int64_t{offset} + params.window_right);
    s.seqlen_k = cute::max(cute::min(s.seqlen_k, s.seqlen_q + s.causal_offset), 0);
    return s;
  }

 private:
  // Offsets beyond these hide or show the same keys: from the first one, every row is before it; from the second one,
  // every row is behind the last key.
  SDPA_DEVICE int within(int64_t offset) const {
    return static_cast<int>(cute::max(int64_t{-seqlen_q}, cute::min(int64_t{seqlen_k}, offset)));
  }

  // The first packed row of the sequence, whose length is cut to what lies in the tensor; 0 for tensors with a batch.
  SDPA_DEVICE static int first_row(const LengthsRef &lengths, int bidb, int &length) {
    if (lengths.cu_seqlens == nullptr) return 0;
    const int begin = cute::max(0, cute::min(lengths.cu_seqlens[bidb], lengths.total));
    const int end = cute::max(begin, cute::min(lengths.cu_seqlens[bidb + 1], lengths.total));
    length = cute::min(length, end - begin);
    return begin;
  }

  SDPA_DEVICE static int used(const LengthsRef &lengths, int bidb, int length) {
    return lengths.seqlens == nullptr ? length : cute::max(0, cute::min(lengths.seqlens[bidb], length));
  }
};

}  // namespace sdpa
