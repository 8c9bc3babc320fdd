"""How many keys of a mask's row kernels read at once, and from which size on others are copied for that."""

from __future__ import annotations

from collections.abc import Mapping

LONGEST_RUN = 8
"""The most neighbouring keys that a thread of any kernel reads at once, by vectors of up to 16 bytes."""
RUNS: Mapping[str, int] = {"fmha_fwd": LONGEST_RUN, "fmha_fwd_sm90": 2, "fmha_fwd_q8": 4}
"""The same by the family's name: kMaskRun of its kernel_traits.cuh."""
UNALIGNED_COPY_SCORES = 2**23
"""From so many scores on, a mask is copied whose rows do not begin where vectors may, as with an odd number
of keys. On an H200 (2026-11-24) a bool mask of 6029 by 6029, head_dim 80, took 252 µs in the fastest kernel;
the model of aligned rows has 84: 5 µs for a million scores. No plan is kept for a copy, so each call
takes as long as a first one; the limit is higher for that. The copy itself takes about 2 µs for a million
scores: 65 million in rows of 1588 bool or float16 keys, head_dim 64, took 245 µs with it on an H200
(2026-11-26), and 106 in rows of 1600 that need none."""
LONG_COPY_KEYS = 2048
"""The same from so many keys on, however few the scores: tiles are few then, and each waits for its scores in
every block. On an H200 (benchmarks/results/tuning/2026-11-29-h200-long-masks.json) 104 rows of one head of
256 and 8949 keys took 897 µs as they lay and 276 with a copy, ten other masks 1.5 to 3.1 times as long."""


def copies_unaligned(scores: int, keys: int) -> bool:
    """Whether a mask is copied whose rows do not begin where vectors may."""
    return scores >= UNALIGNED_COPY_SCORES or keys >= LONG_COPY_KEYS
