"""How many keys rows see: all rows of a problem together, and the rows of tiles that its CTAs work on.

Row i sees the keys j <= i + causal_offset, or all of them without a causal mask. A row of tiles ends with its
last row, which sees the most.
"""

from __future__ import annotations

from ..problem import Problem

_MAX_SAMPLES = 64  # rows of tiles looked at to average a causal mask


def visible_scores(problem: Problem) -> int:
    """Scores of one head that are not masked: row i sees clamp(i + causal_offset + 1, 0, seqlen_k) keys."""
    rows, keys = problem.seqlen_q, problem.seqlen_k
    if not problem.is_causal:
        return rows * keys
    first = problem.causal_offset + 1
    start = min(max(1 - first, 0), rows)  # the first row that sees a key
    full = min(max(keys - first, start), rows)  # the first row that sees them all
    partial = full - start
    return partial * (first + start) + partial * (partial - 1) // 2 + (rows - full) * keys


class CausalRows:
    """At most _MAX_SAMPLES evenly spaced rows of tiles of a causal problem, the longest first.

    `heads` neighbouring rows of a tile are the same position. A row of tiles visits its keys in rounds of a
    given number of keys.
    """

    __slots__ = ("_block_m", "_heads", "_keys", "_last", "_m_blocks", "_offset", "_step", "count")

    def __init__(self, problem: Problem, block_m: int, heads: int) -> None:
        self._block_m = block_m
        self._heads = heads
        self._keys = problem.seqlen_k
        self._offset = problem.causal_offset
        self._last = problem.seqlen_q * heads - 1
        self._m_blocks = self._last // block_m + 1
        self._step = -(-self._m_blocks // _MAX_SAMPLES)
        self.count = -(-self._m_blocks // self._step)

    def rounds(self, place: int, keys_a_round: int) -> int:
        """Rounds of the row of tiles at `place`."""
        last = (self._m_blocks - place * self._step) * self._block_m - 1 if place else self._last
        keys = last // self._heads + self._offset + 1
        if keys <= 0:
            return 0
        return -(-(keys if keys < self._keys else self._keys) // keys_a_round)

    def all_rounds(self, keys_a_round: int) -> int:
        """Rounds of all of these rows of tiles together."""
        longest = self.rounds(0, keys_a_round)
        others = self.count - 1
        if not others:
            return longest
        # From the shortest on, row of tiles i ends with row start + i * stride. Those before `some` see no
        # key and those from `full` on every key; between them, rounds are floors of a straight line.
        heads, offset, stride = self._heads, self._offset, self._block_m * self._step
        start = (self._m_blocks - others * self._step) * self._block_m - 1
        some = _clamped(-((start + offset * heads) // stride), 0, others)
        full = _clamped(-((start - (self._keys - offset - 1) * heads) // stride), some, others)
        first = start + some * stride + (offset + keys_a_round) * heads
        line = floor_sum(full - some, first, stride, keys_a_round * heads)
        return longest + line + (others - full) * -(-self._keys // keys_a_round)


def _clamped(value: int, least: int, most: int) -> int:
    """min(max(value, least), most) in half the time."""
    return least if value < least else most if value > most else value


def floor_sum(count: int, start: int, step: int, divisor: int) -> int:
    """The sum of (start + i * step) // divisor for i from 0 to count - 1; no argument is negative.

    Counts lattice points under a line: where the line is flatter than 1, the axes are exchanged.
    """
    total = 0
    while True:
        total += count * (count - 1) // 2 * (step // divisor) + count * (start // divisor)
        step, start = step % divisor, start % divisor
        height, rest = divmod(count * step + start, divisor)
        if height == 0:
            return total
        count, start, step, divisor = height, rest, divisor, step
