"""What the loops of a fused kernel must hold, derived from its tile and head dimension and from nothing
else.

One pass of a main loop takes one block of keys. Of the kernel's warps, warps / kv_groups share the query
rows, so a warp has m = block_m / (16 · warps / kv_groups) blocks of 16 rows, and of each

    S = Q Kᵀ     m · (block_n / 8) · (head_dim / 16)   mma.sync m16n8k16
    O += P V     m · (head_dim / 8) · (block_n / 16)   of them

ldmatrix.x4 brings 16 x 16 elements: all of K, all of V (transposed), and the warp's rows of Q unless these
stay in registers (q_in_regs, and every kernel with KV groups). The warps of a group load one K and one V
tile in 16-byte cp.async. Softmax takes one ex2 per score and one per row for the rescale, and the row
maximum crosses a quad of lanes in two shuffles. Masks, dropout and causal add other instructions, none of
these.

A general kernel is several functions, one for each kind of mask: see `symbols`.
"""

from __future__ import annotations

from sdpa_cutlass.library.registry import KernelInfo, Takes
from sdpa_cutlass.machine_code.mix import Mix

_MMA_M, _MMA_N, _MMA_K = 16, 8, 16
_LDMATRIX = 16  # rows and columns of one ldmatrix.x4
_COPY_ELEMENTS = 8  # of one 16-byte cp.async
_QUAD_SHUFFLES = 2
_LANES = 32

# A name of the table and the opcodes that it counts.
COUNTED = {
    "HMMA": r"HMMA\.16816\.F32",
    "LDSM": r"LDSM\.16\.M88\.4$",
    "LDSM.T": r"LDSM\.16\.MT88\.4$",
    "LDGSTS": r"LDGSTS\..*\b128$",
    "MUFU": r"MUFU",
    "SHFL": r"SHFL",
}
LOOPS = 2  # of a function: for blocks of keys of which some are not seen, and for whole ones

# Widths, in bytes, of global accesses beside the 16-byte stores of the output:
_LSE = {4}  # one float a row
_Q_DIRECT = {4}  # two elements at a time, straight into the operand's registers
_LENGTHS = {4}
PHILOX = {8}  # seed and offset
MASK_BYTES = {"bool": 1, "bias16": 2, "bias32": 4}  # an element, by the last word of a function's symbol
_WIDEST = 16
QUANTIZED_LOADS = {2, 4, 16}  # Q, scales, lengths and sinks
_QUANTIZED_RUN = 4  # neighbouring keys that a thread of a quantised kernel holds: its kernel_traits.cuh
SOFTMAX_LOADS = {2, 4, 16}  # of the piped baseline: one logit at a time where a row's keys end in a vector
BACKWARD_LOADS = {1, 2, 4, 8, 16}  # masks one element at a time; seed and offset; two numbers of a row
BACKWARD_STORES = {2, 4, 8, 16}  # two numbers of a row; an element of a bias's gradient
_PARTS = {4, 8, 16}  # of the splits: O four floats at a time, row_max with row_sum, the count of arrivals
_SINKS = {2, 4}  # of 16 or 32 bits
MERGE = "_split_merge"  # ends the symbol of the function that merges large parts
MERGE_LOADS = _PARTS | _SINKS
MERGE_STORES = {8} | _LSE  # four elements of the output


def loop_counts(kernel: KernelInfo) -> dict[str, int]:
    """How often each of COUNTED stands in every main loop of a fused kernel."""
    group_warps = kernel.warps // kernel.kv_groups
    m = kernel.block_m // (_MMA_M * group_warps)
    n, d = kernel.block_n, kernel.head_dim
    q_from_smem = not kernel.q_in_regs and kernel.kv_groups == 1
    rows = 2 * m  # of one thread
    tile_copies = n * d // (_COPY_ELEMENTS * _LANES * group_warps)
    k_or_v = (n // _LDMATRIX) * (d // _LDMATRIX)
    return {
        "HMMA": m * (n // _MMA_N) * (d // _MMA_K) + m * (d // _MMA_N) * (n // _MMA_K),
        "LDSM": k_or_v + (m * (d // _LDMATRIX) if q_from_smem else 0),
        "LDSM.T": k_or_v,
        "LDGSTS": 2 * tile_copies,
        "MUFU": rows * n // 4 + rows,
        "SHFL": _QUAD_SHUFFLES * rows,
    }


def counted(mix: Mix) -> dict[str, int]:
    """How often each of COUNTED stands in a loop as it was compiled."""
    return {name: mix.count(pattern) for name, pattern in COUNTED.items()}


def symbols(kernel: KernelInfo) -> list[str]:
    """The functions of a fused kernel: the one without a mask has its name, the others a word more."""
    masks = (mask for mask in MASK_BYTES if Takes[mask.upper()] in kernel.takes)
    return [kernel.name, *(f"{kernel.name}_{mask}" for mask in masks)]


def mask_bytes(kernel: KernelInfo, symbol: str) -> int | None:
    """Bytes of a mask's element in one of the functions; None in that without masks."""
    return MASK_BYTES.get(symbol.removeprefix(kernel.name).removeprefix("_"))


def load_widths(kernel: KernelInfo, symbol: str) -> set[int]:
    """Widths that global loads of one of the functions may have, other than cp.async."""
    if kernel.is_split:
        return _PARTS | _SINKS
    widths = set(_Q_DIRECT) if kernel.kv_groups > 1 and not _takes_q_by_ring(kernel) else set()
    if kernel.is_general:
        widths |= _LENGTHS | _SINKS | (PHILOX if kernel.has_dropout else set())
    element = mask_bytes(kernel, symbol)
    if element is not None:
        run = 2 if kernel.has_dropout else 8  # neighbouring keys that a thread holds: kernel_traits.cuh
        widths |= {element, min(run * element, _WIDEST)}
    return widths


def quantized_load_widths(symbol: str) -> set[int]:
    """`load_widths` of the functions of quantised kernels."""
    if symbol.endswith("_split"):
        return QUANTIZED_LOADS | _PARTS
    element = MASK_BYTES.get(symbol.rpartition("_")[2])
    if element is None:
        return QUANTIZED_LOADS
    return QUANTIZED_LOADS | {element, _QUANTIZED_RUN * element}


def quantized_store_widths(symbol: str) -> set[int]:
    """`store_widths` of the functions of quantised kernels."""
    return {16} | _LSE | (_PARTS if symbol.endswith("_split") else set())


def store_widths(kernel: KernelInfo) -> set[int]:
    """Widths that global stores may have."""
    return {16} | _LSE | (_PARTS if kernel.is_split else set())


def _takes_q_by_ring(kernel: KernelInfo) -> bool:
    """One warp a group, and a tile of K has room for Q; never in split kernels: kernel_traits.cuh."""
    return not kernel.is_split and kernel.kv_groups == kernel.warps and kernel.block_m <= kernel.block_n
