"""The static gates of the quantised kernels: what must hold of the code of every row's functions.

    S = Q̂ K̂ᵀ   IMMA 16 x 8 x 32             rows / 16 · keys / 8 · head_dim / 32 in each main loop of a warp
    O += P̂ V̂   IMMA 16 x 8 x 32, int8       rows / 16 · head_dim / 8 · keys / 32, twice: see below
    O += P V   HMMA 16 x 8 x 16, int8_qk    rows / 16 · head_dim / 8 · keys / 16

Two loops, one of which masks. For int8, blocks whose tokens share scales have code of their own from softmax
on. Split kernels have one loop, and one piece of code for O += P̂ V̂; a warp of theirs has all rows of a tile.
Bytes are never transposed on the way from shared memory, and nothing lies in local memory. Where nothing is
masked, a whole pass takes no more instructions a score than MOST_PER_SCORE allows: an RTX 4090 may issue 16
(head_dim 64) or 32 while its tensor cores multiply.
"""

from __future__ import annotations

from sdpa_cutlass.library.registry import Accuracy, Family, KernelInfo
from sdpa_cutlass.machine_code.expected import MASK_BYTES
from sdpa_cutlass.machine_code.kernels import KernelCode

LOOPS = 2
LOOPS_OF_SPLIT = 1
# (accuracy, head_dim) → instructions of a thread for a score, in the loop that masks nothing.
MOST_PER_SCORE = {
    (Accuracy.INT8, 64): 10.3,
    (Accuracy.INT8, 128): 13.7,
    (Accuracy.INT8_QK, 64): 8.2,
    (Accuracy.INT8_QK, 128): 12.2,
}
_LANES = 32
_PASS = "_quantize"  # the function that makes the bytes
_SUFFIXES = ("", *(f"_{mask}" for mask in MASK_BYTES), _PASS)


def loop_counts(kernel: KernelInfo) -> dict[str, int]:
    """How often each kind of instruction stands in every main loop of a row's attention."""
    m = kernel.block_m * kernel.kv_groups // (16 * kernel.warps)
    n, d = kernel.block_n, kernel.head_dim
    is_int8 = kernel.accuracy is Accuracy.INT8
    pieces = 1 if kernel.is_split else 2
    bytes_of_pv, halves_of_pv = m * (d // 8) * (n // 32), m * (d // 8) * (n // 16)
    return {
        r"IMMA\.16832": m * (n // 8) * (d // 32) + (pieces * bytes_of_pv if is_int8 else 0),
        r"HMMA\.16816": 0 if is_int8 else halves_of_pv,
        r"LDSM\.16\.MT88": 0 if is_int8 else (n // 16) * (d // 16),
    }


def scores_of_a_thread(kernel: KernelInfo) -> float:
    """In one pass of a main loop."""
    return kernel.block_m * kernel.kv_groups / kernel.warps * kernel.block_n / _LANES


def problems(code: KernelCode, kernel: KernelInfo) -> list[str]:
    """A line for everything that must hold of one of a row's functions and does not."""
    found = []
    if code.stack_bytes:
        found.append(f"stack is {code.stack_bytes} bytes; it must be 0")
    if code.local_instructions:
        found.append(f"{code.local_instructions} loads and stores of local memory; there must be none")
    if not code.name.endswith(_PASS):
        found += _loop_problems(code, kernel)
    return [f"{code.name}: {problem}" for problem in found]


def _loop_problems(code: KernelCode, kernel: KernelInfo) -> list[str]:
    loops = LOOPS_OF_SPLIT if kernel.is_split else LOOPS
    if len(code.mma_loops) != loops:
        return [f"{len(code.mma_loops)} main loops; there must be {loops}"]
    found = []
    for loop in code.mma_loops:
        for pattern, wanted in loop_counts(kernel).items():
            count = loop.mix.count(pattern)
            if count != wanted:
                found.append(f"{count} {pattern} in the loop at {loop.address:#x}; its tile takes {wanted}")
    most = MOST_PER_SCORE.get((kernel.accuracy, kernel.head_dim))
    if code.name == kernel.name and not kernel.is_split and most is not None:
        least = min(loop.whole.instructions for loop in code.mma_loops) / scores_of_a_thread(kernel)
        if least > most:
            found.append(f"{least:.2f} instructions a score where nothing is masked; at most {most}")
    return found


def rows(kernels: tuple[KernelInfo, ...]) -> dict[str, KernelInfo]:
    """The rows of the family by the symbols of their functions."""
    quantised = [kernel for kernel in kernels if kernel.family is Family.FMHA_FWD_Q8]
    return {
        f"{kernel.name}{suffix}": kernel
        for kernel in quantised
        for suffix in (_SUFFIXES if kernel.mask_types else ("", _PASS))
    }
