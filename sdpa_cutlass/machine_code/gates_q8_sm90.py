"""The static gates of Hopper's quantised kernels: what must hold of the sm_90a code of every row's functions.

    S = Q̂ K̂ᵀ    head_dim / 32   wgmma 64 x keys x 32, s8 · s8, for the first block and in the loop behind it
    O += P̂ V̂    keys / 32       wgmma 64 x head_dim x 32, u8 · s8, in the loop and for the last block

One loop multiplies, whatever hides some of its keys, and one instruction covers all columns of S or of the
sums. As in gates_sm90.py each multiplication starts once (WARPGROUP.ARRIVE), registers move from the warps
that load to those that compute and are no more than the launch gave, and K and V travel by TMA. Q does not,
and is loaded four elements at a time; the result leaves in 16 bytes. Nothing lies in local memory.
"""

from __future__ import annotations

from collections import Counter

from sdpa_cutlass.library.registry import Family, KernelInfo
from sdpa_cutlass.machine_code.expected import QUANTIZED_LOADS, quantized_store_widths
from sdpa_cutlass.machine_code.gates_sm90 import register_problems
from sdpa_cutlass.machine_code.kernels import KernelCode
from sdpa_cutlass.machine_code.mix import Mix

_PASS = "_quantize"  # the function that makes the bytes
_PLACES = 2  # of each multiplication: the loop, and the first or the last block
_MMA_K = 32
_STARTS = 2  # of multiplications, in each place
_Q_BYTES = {8}  # four elements, which are one register of bytes
_KINDS = ("WARPGROUP.ARRIVE", "USETMAXREG.DEALLOC", "USETMAXREG.TRY_ALLOC")
_OF_FUNCTION = {"USETMAXREG.DEALLOC": 1, "USETMAXREG.TRY_ALLOC": 1}


def loop_counts(kernel: KernelInfo) -> dict[str, int]:
    """How often each kind of instruction stands in the main loop of a row's attention."""
    return {
        f"IGMMA 64x{kernel.block_n}x{_MMA_K}.S8.S8": kernel.head_dim // _MMA_K,
        f"IGMMA 64x{kernel.head_dim}x{_MMA_K}.U8.S8": kernel.block_n // _MMA_K,
        "WARPGROUP.ARRIVE": _STARTS,
    }


def problems(code: KernelCode, kernel: KernelInfo) -> list[str]:
    """A line for everything that must hold of one of a row's functions and does not."""
    found = []
    if code.stack_bytes:
        found.append(f"stack is {code.stack_bytes} bytes; it must be 0")
    if code.local_instructions:
        found.append(f"{code.local_instructions} loads and stores of local memory; there must be none")
    is_pass = code.name.endswith(_PASS)
    loads = QUANTIZED_LOADS if is_pass else QUANTIZED_LOADS | _Q_BYTES
    for what, group, allowed in (
        ("loads", "LDG", loads),
        ("stores", "STG", quantized_store_widths(code.name)),
    ):
        if wrong := sorted(set(code.mix.widths(group)) - allowed):
            found.append(f"{what} of {wrong} bytes")
    if not is_pass:
        found += _problems_of_attention(code, kernel)
    return [f"{code.name}: {problem}" for problem in found]


def _problems_of_attention(code: KernelCode, kernel: KernelInfo) -> list[str]:
    found = register_problems(code, kernel)
    in_loop = loop_counts(kernel)
    everywhere = {kind: _PLACES * count for kind, count in in_loop.items()} | _OF_FUNCTION
    found += _differences(code.mix, everywhere, "")
    multiplying = [loop for loop in code.loops if loop.mix.count("IGMMA")]
    if len(multiplying) == 1:
        (loop,) = multiplying
        found += _differences(loop.mix, in_loop, f" in the loop at {loop.address:#x}")
    else:
        found.append(f"{len(multiplying)} main loops; there must be 1")
    if not code.mix.count("UTMALDG"):
        found.append("no UTMALDG: its tiles do not come by TMA")
    return found


def _differences(mix: Mix, wanted: dict[str, int], where: str) -> list[str]:
    counts = _counted(mix)
    return [
        f"{counts.get(kind, 0)} {kind}{where}; its tile takes {wanted.get(kind, 0)}"
        for kind in sorted(wanted.keys() | counts.keys())
        if counts.get(kind, 0) != wanted.get(kind, 0)
    ]


def _counted(mix: Mix) -> dict[str, int]:
    """Every wgmma by shape and types, and the other kinds, of code as it was compiled."""
    found: Counter[str] = Counter()
    for opcode, count in mix.opcodes.items():
        base, _, rest = opcode.partition(".")
        if base.endswith("GMMA"):
            found[f"{base} {rest}"] += count
        for kind in _KINDS:
            if opcode.startswith(kind):
                found[kind] += count
    return dict(found)


def rows(kernels: tuple[KernelInfo, ...]) -> dict[str, KernelInfo]:
    """The rows of the family by the symbols of their functions."""
    quantised = [kernel for kernel in kernels if kernel.family is Family.FMHA_FWD_Q8_SM90]
    return {kernel.name + suffix: kernel for kernel in quantised for suffix in ("", _PASS)}
