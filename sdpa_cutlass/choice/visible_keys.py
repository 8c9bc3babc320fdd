"""How many keys the rows of tiles see that the CTAs of a problem work on, under a causal mask or a window.

Row i sees the keys j <= i + causal_offset, or all of them without a causal mask. A row of tiles ends with its
last row, which sees the most. Under a window it begins with the first key of its first row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..problem import Problem


_MAX_SAMPLES = 64  # rows of tiles looked at to average a causal mask
_MAX_WINDOW_SAMPLES = 8  # they differ little


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


class WindowRows:
    """At most _MAX_WINDOW_SAMPLES evenly spaced rows of tiles under a window, the longest first."""

    __slots__ = ("_spans", "count")

    def __init__(self, problem: Problem, block_m: int, heads: int) -> None:
        assert problem.window is not None
        left, right = problem.window
        keys, offset, last = problem.seqlen_k, problem.causal_offset, problem.seqlen_q * heads - 1
        m_blocks = last // block_m + 1
        step = -(-m_blocks // _MAX_WINDOW_SAMPLES)
        spans = []  # first key, one past the last
        for m_block in range(m_blocks - 1, -1, -step):
            first_row, last_row = m_block * block_m // heads, min((m_block + 1) * block_m - 1, last) // heads
            begin = 0 if left < 0 else _clamped(first_row + offset - left, 0, keys)
            end = keys if right < 0 else _clamped(last_row + offset + right + 1, 0, keys)
            spans.append((begin, max(begin, end)))
        self._spans = sorted(spans, key=lambda span: span[0] - span[1])
        self.count = len(spans)

    def rounds(self, place: int, keys_a_round: int) -> int:
        """Rounds of the row of tiles at `place`."""
        begin, end = self._spans[place]
        return -(-end // keys_a_round) - begin // keys_a_round if end > begin else 0

    def all_rounds(self, keys_a_round: int) -> int:
        """Rounds of all of these rows of tiles together."""
        return sum(self.rounds(place, keys_a_round) for place in range(self.count))


def rows_of_tiles(problem: Problem, block_m: int, heads: int) -> CausalRows | WindowRows | None:
    """The rows of tiles of `problem`; None where each of them sees every key."""
    if problem.window is not None:
        return WindowRows(problem, block_m, heads)
    return CausalRows(problem, block_m, heads) if problem.is_causal else None


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
