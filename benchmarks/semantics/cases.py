"""All edge cases, by topic: the order of the tables."""

from __future__ import annotations

from benchmarks.semantics.outcomes import EdgeCase
from benchmarks.semantics.shapes import HEADS_AND_HEAD_DIMS, LENGTHS, SIZES_OF_ZERO, TYPES_AND_LAYOUTS
from benchmarks.semantics.values import DROPOUT, NAN_AND_INFINITY, SCALE
from benchmarks.semantics.visibility import CAUSAL, FORMS_OF_MASKS, ROWS_WITHOUT_A_KEY

TOPICS: dict[str, list[EdgeCase]] = {
    "Rows without a key": ROWS_WITHOUT_A_KEY,
    "Causal masks": CAUSAL,
    "Forms of masks": FORMS_OF_MASKS,
    "NaN and infinity": NAN_AND_INFINITY,
    "Lengths": LENGTHS,
    "Sizes of zero": SIZES_OF_ZERO,
    "Scale": SCALE,
    "Dropout": DROPOUT,
    "Heads and head dimensions": HEADS_AND_HEAD_DIMS,
    "Types and layouts": TYPES_AND_LAYOUTS,
}
CASES: dict[str, EdgeCase] = {case.name: case for cases in TOPICS.values() for case in cases}
assert len(CASES) == sum(map(len, TOPICS.values())), "two cases share a name"
