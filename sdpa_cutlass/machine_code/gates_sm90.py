"""The static gates of Hopper's fused kernels: what must hold of the sm_90a code of every row.

    S = Q Kᵀ     head_dim / 16   wgmma 64 x block_n x 16, for the first block and in the loop of the others
    O += P V     block_n / 16    wgmma 64 x head_dim x 16, in that loop and behind it

One instruction covers a row of S or O: CuTe builds other widths of many small ones when it does not know
them. Each score takes one ex2, and each of a thread's two rows one more where its reference moves. Registers
move from the warps that load to those that compute, tiles travel by TMA, and what ptxas could not keep in
registers would be local memory. Each multiplication starts once (WARPGROUP.ARRIVE): where ptxas fears for its
registers, it serialises the wgmma of a kernel, starts each by itself, and says so in a line that the build
does not show. What setmaxnreg deals out is no more than the launch gave, and warps use no
register that they gave away. General kernels read lengths and sinks besides; a sink takes one more ex2 of
a row, of which there are two to choose from. Those with masks are a function for each kind, which reads its
elements in pairs or one by one, and those with dropout read seed and offset. What finds the blocks of a
boolean mask reads 16 bytes at a time, and the loads of kernels for such masks read what it found. Split
kernels leave two columns of a part at a time, which a function of their own reads and stores merged. Pairs of
CTAs, and they alone, meet at a barrier of the cluster and send K and V to both; the warp that loads has more
to keep there.
"""

from __future__ import annotations

from collections import Counter

from sdpa_cutlass.library.registry import Family, KernelInfo, Takes
from sdpa_cutlass.machine_code import expected as fused
from sdpa_cutlass.machine_code.kernels import KernelCode
from sdpa_cutlass.machine_code.mix import Mix

ARCH = 90
_PLACES = 2  # of each multiplication: the first or last block, and the loop
_MMA_K = 16
_ROWS = 2  # of a thread
_LSE_BYTES = {4}
_WARPGROUP_ROWS = 64
_SINK_EX2 = 2  # for each row
_LENGTH_AND_SINK_BYTES = {2, 4}
_MASK_RUN = 2  # neighbouring columns of a mask that a thread holds
_MERGE = "_merge"
_MASK_BLOCKS = "_mask_blocks"  # ends the symbol of the function that finds them
_MASK_BLOCKS_BYTES = {16}
_PART_BYTES = {8}
_MASK_BITS_BYTES = {8, 16}  # of what it found, or of a part of it
_REGISTERS_OF_PAIRS = (40, 232)  # of the warps that load, and of those that compute
_KINDS = (
    *("WARPGROUP.ARRIVE", "MUFU.EX2", "UTMASTG", "USETMAXREG.DEALLOC", "USETMAXREG.TRY_ALLOC"),
    *("UCGABAR_ARV", "UCGABAR_WAIT"),
)


def expected(kernel: KernelInfo) -> dict[str, int]:
    """How often each kind of instruction stands in the code of a row."""
    shapes: Counter[str] = Counter()
    shapes[f"64x{kernel.block_n}x16"] += _PLACES * kernel.head_dim // _MMA_K
    shapes[f"64x{kernel.head_dim}x16"] += _PLACES * kernel.block_n // _MMA_K
    sinks = _SINK_EX2 * _ROWS if kernel.is_general else 0
    columns = next((columns for columns in (64, 32) if kernel.head_dim % columns == 0), 16)
    return {
        **{f"HGMMA {shape}": count for shape, count in sorted(shapes.items())},
        "WARPGROUP.ARRIVE": 2 * _PLACES,
        "MUFU.EX2": _PLACES * (_ROWS * kernel.block_n // 4 + _ROWS) + sinks,
        "UTMASTG": kernel.head_dim // columns,
        "USETMAXREG.DEALLOC": 1,
        "USETMAXREG.TRY_ALLOC": 1,
        **({"UCGABAR_ARV": 1, "UCGABAR_WAIT": 1} if _is_pair(kernel) else {}),
    }


def _is_pair(kernel: KernelInfo) -> bool:
    return kernel.detail("cluster", 1) == 2


def counted(mix: Mix) -> dict[str, int]:
    """The same of code as it was compiled."""
    found: Counter[str] = Counter()
    for opcode, count in mix.opcodes.items():
        if opcode.startswith("HGMMA."):
            found[f"HGMMA {opcode.split('.')[1]}"] += count
        for kind in _KINDS:
            if opcode.startswith(kind):
                found[kind] += count
    return dict(found)


def problems(code: KernelCode, kernel: KernelInfo) -> list[str]:
    """A line for everything that must hold of a row's code and does not."""
    found = []
    if code.stack_bytes:
        found.append(f"stack is {code.stack_bytes} bytes; it must be 0")
    if code.local_instructions:
        found.append(f"{code.local_instructions} loads and stores of local memory; there must be none")
    if wrong := sorted(set(code.mix.widths("LDG")) - _load_widths(kernel, code.name)):
        found.append(f"loads of {wrong} bytes from global memory other than by TMA")
    if not code.name.endswith(_MASK_BLOCKS):
        if wrong := sorted(set(code.mix.widths("STG")) - _store_widths(kernel, code.name)):
            found.append(f"stores of {wrong} bytes to global memory other than by TMA")
        if not code.name.endswith(fused.MERGE):
            found += _problems_of_attention(code, kernel)
    return [f"{code.name}: {problem}" for problem in found]


def _problems_of_attention(code: KernelCode, kernel: KernelInfo) -> list[str]:
    found = register_problems(code, kernel)
    wanted, counts = expected(kernel), counted(code.mix)
    found += [
        f"{counts.get(kind, 0)} {kind}; its tile takes {wanted.get(kind, 0)}"
        for kind in sorted(wanted.keys() | counts.keys())
        if counts.get(kind, 0) != wanted.get(kind, 0)
    ]
    if not code.mix.count(r"UTMALDG"):
        found.append("no UTMALDG: its tiles do not come by TMA")
    multicasts = code.mix.count(r"UTMALDG\.4D\.MULTICAST")
    if bool(multicasts) != _is_pair(kernel):
        found.append(f"{multicasts} UTMALDG.MULTICAST; pairs of CTAs load K and V so, and nothing else does")
    return found


def _load_widths(kernel: KernelInfo, symbol: str) -> set[int]:
    """Widths that the loads of one of a row's functions may have, other than TMA's."""
    if not kernel.is_general:
        return set()
    if symbol.endswith(_MASK_BLOCKS):
        return _MASK_BLOCKS_BYTES
    if symbol.endswith(fused.MERGE):
        return fused.MERGE_LOADS
    element = fused.mask_bytes(kernel, symbol)
    mask = set() if element is None else {element, _MASK_RUN * element}
    if element == 1:
        mask |= _MASK_BITS_BYTES
    return _LENGTH_AND_SINK_BYTES | mask | (fused.PHILOX if kernel.has_dropout else set())


def _store_widths(kernel: KernelInfo, symbol: str) -> set[int]:
    """The same of stores: softmax_lse, and the parts of splits."""
    if symbol.endswith(fused.MERGE):
        return fused.MERGE_STORES
    return _LSE_BYTES | (_PART_BYTES if kernel.is_split else set())


def register_problems(code: KernelCode, kernel: KernelInfo) -> list[str]:
    """Registers that warps no longer have, and more than the launch gave, for which they would wait."""
    if not code.setmaxnreg:
        return ["no USETMAXREG with a number before its loads"]
    kept, got, highest = code.setmaxnreg
    found = []
    if _is_pair(kernel) and (kept, got) != _REGISTERS_OF_PAIRS:
        found.append(f"{kept} and {got} registers are dealt out; pairs have {_REGISTERS_OF_PAIRS}")
    if highest >= kept:
        found.append(f"R{highest} in warps that keep {kept} registers")
    consumers = kernel.block_m // _WARPGROUP_ROWS
    dealt, given = kept + consumers * got, (consumers + 1) * code.registers
    if dealt > given:
        found.append(f"{dealt} registers are dealt out to {consumers + 1} threads; the launch gave {given}")
    return found


def rows(kernels: tuple[KernelInfo, ...]) -> dict[str, KernelInfo]:
    """The rows of the family by the symbols of their functions."""
    hopper = [kernel for kernel in kernels if kernel.family is Family.FMHA_FWD_SM90]
    found = {symbol: kernel for kernel in hopper for symbol in fused.symbols(kernel)}
    found |= {kernel.name + _MASK_BLOCKS: kernel for kernel in hopper if Takes.BOOL in kernel.takes}
    return found | {kernel.name + _MERGE: kernel for kernel in hopper if kernel.is_split}
