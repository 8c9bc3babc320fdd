"""Shards of a longer problem: where their rows and keys stand in it, as one word of a call.

Row i of a shard is row row_offset + i of the whole, and key j is key key_offset + j. A causal mask and a
window that count from the top left need no more of this than the difference: row i stands next to key
i + diagonal. The option `causal` of a shard is a word with that number in it, "top_left+128", or "no_mask-64"
where a window alone counts. So plans, operators and the compiled calls tell shards apart as they do other
options.
"""

from __future__ import annotations

import operator
import re

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..problem import Causal

_NO_MASK = "no_mask"
_WORD = re.compile(r"(top_left|no_mask)([+-][0-9]+)")
_LIMIT = 2**63


def word(causal: object, row_offset: object, key_offset: object) -> str:
    """The option `causal` of a shard. Raises ArgumentError or ArgumentTypeError."""
    rows, keys = _offset("row_offset", row_offset), _offset("key_offset", key_offset)
    if causal not in (None, Causal.TOP_LEFT):
        raise ArgumentError(
            f"causal={causal!r} with row_offset or key_offset; allowed are None and 'top_left': a shard does "
            "not know where the whole problem ends. For bottom_right, add the whole's seqlen_k - seqlen_q to "
            "row_offset"
        )
    return f"{_NO_MASK if causal is None else Causal.TOP_LEFT.value}{rows - keys:+d}"


def read(causal: object) -> tuple[Causal | None, int] | None:
    """The causal mask and the diagonal that `word` wrote; None for any other option."""
    if type(causal) is not str or not causal[-1:].isdecimal():
        return None
    found = _WORD.fullmatch(causal)
    if found is None:
        return None
    return (None if found[1] == _NO_MASK else Causal.TOP_LEFT), int(found[2])


def check_no_dropout(p_dropout: float) -> None:
    """Raises UnsupportedError: random bits belong to positions, and kernels know those in the shard alone."""
    if p_dropout:
        raise UnsupportedError(
            f"p_dropout={p_dropout!r} with row_offset or key_offset; allowed is 0: which weights are dropped "
            "follows from positions in the shard, not in the whole"
        )


def _offset(name: str, value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{name}={value!r} is a {type(value).__name__}; allowed is an integer")
    number = operator.index(value)
    if not 0 <= number < _LIMIT:
        raise ArgumentError(f"{name}={value!r}; allowed are integers from 0 to 2^63 - 1")
    return number
