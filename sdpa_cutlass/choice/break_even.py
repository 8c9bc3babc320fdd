"""From which length on a quantised kernel should be faster than an exact one."""

from __future__ import annotations

import dataclasses

from ..library.abi import Library
from ..library.device import DeviceInfo
from ..library.registry import Family, Precision
from ..problem import Problem
from .select import ranking

SEQLENS = tuple(2**n for n in range(8, 17))


def break_even(library: Library, problem: Problem, precision: Precision, device: DeviceInfo) -> int | None:
    """The least of SEQLENS from which on `precision` is predicted to be faster on `device`, the pass over
    keys and values included; None where it never is. Problems have as many queries as keys, and else what
    `problem` has.
    """
    found = None
    for seqlen in reversed(SEQLENS):
        square = dataclasses.replace(problem, seqlen_q=seqlen, seqlen_k=seqlen)
        own = ranking(library, square, precision, device)
        exact = ranking(library, square, Family.FMHA_FWD, device)
        if not own or not exact or own[0][1].microseconds >= exact[0][1].microseconds:
            break
        found = seqlen
    return found
