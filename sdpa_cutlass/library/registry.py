"""The registry: one frozen row per kernel, read from the library and never from a second file."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum, IntFlag
from typing import TYPE_CHECKING

from ..errors import LibraryMismatchError
from ..problem import DType, MaskType

if TYPE_CHECKING:
    from .abi import Library


class Family(Enum):
    """``FMHA_FWD``: the fused kernels, ``FMHA_FWD_SM90``: those of Hopper. ``UNFUSED``: GEMM → softmax →
    GEMM, the baseline. ``COMBINE``: those that merge partial results, for `merge_states`. ``FMHA_FWD_Q8``:
    the quantised ones, which a `Precision` asks for, ``FMHA_FWD_Q8_SM90``: those of Hopper. ``FMHA_BWD``:
    those that make gradients, ``FMHA_BWD_FUSED``: those that compute each score once.

    Who asks for FMHA_FWD, as `attention` does, gets the fastest exact kernel of any family
    (`KernelInfo.serves`).
    """

    FMHA_FWD = "fmha_fwd"
    FMHA_FWD_SM90 = "fmha_fwd_sm90"
    UNFUSED = "unfused"
    COMBINE = "combine"
    FMHA_FWD_Q8 = "fmha_fwd_q8"
    FMHA_FWD_Q8_SM90 = "fmha_fwd_q8_sm90"
    FMHA_BWD = "fmha_bwd"
    FMHA_BWD_FUSED = "fmha_bwd_fused"

    __hash__ = object.__hash__  # Enum's own is Python code: 0.3 µs more in every call's signature


class Op(Enum):
    """What a kernel computes; the values are those of enum sdpa_op."""

    FORWARD = 0  # attention
    MERGE = 1  # of partial results
    BACKWARD = 2  # gradients of attention


class Accuracy(Enum):
    """How near to the mathematics a kernel's results are; the values are those of enum sdpa_accuracy."""

    EXACT = 0
    ROUNDED_LOGITS = 1  # logits may be rounded to 16 bits
    INT8_QK = 2  # Q and K are rounded to 8 bits
    INT8 = 3  # and so are V and P

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class Precision(Enum):
    """What a caller may ask for instead of exact kernels; the values are those of `precision`.

    Where a `Family` is asked for, one of these may be: rows of its `accuracy` serve, and no others.
    """

    INT8_QK = "int8_qk"
    INT8 = "int8"

    __hash__ = object.__hash__

    @property
    def accuracy(self) -> Accuracy:
        """That of the rows."""
        return Accuracy[self.name]


Asked = Family | Precision
"""What competes in a choice: FMHA_FWD for all exact kernels, else one family's, or those of a precision."""


class Takes(IntFlag):
    """What a problem may need of a kernel: enum sdpa_takes."""

    FULL = 1 << 0  # every query sees every key
    CAUSAL = 1 << 1
    BOOL = 1 << 2  # a boolean mask
    BIAS16 = 1 << 3  # a mask to add, 16 bits an element
    BIAS32 = 1 << 4
    LENGTHS = 1 << 5  # a length for each sequence, causal aligned to it
    PACKED = 1 << 6  # sequences one after another, without padding
    UNDROPPED = 1 << 7
    DROPOUT = 1 << 8
    SMALLER_HEAD_DIM = 1 << 9  # than the kernel's, and another one for the values
    SPLITS = 1 << 10  # several CTAs share the keys of a tile
    WINDOW = 1 << 11  # a first and a last key for each row
    SINKS = 1 << 12  # a logit of each head in the denominator


TAKES_OF_MASK: dict[MaskType | None, Takes] = {
    None: Takes(0),
    MaskType.BOOL: Takes.BOOL,
    MaskType.F16: Takes.BIAS16,
    MaskType.BF16: Takes.BIAS16,
    MaskType.F32: Takes.BIAS32,
}


@dataclass(frozen=True, kw_only=True)
class KernelInfo:
    """One row of the registry. ``index`` is its place in the library that it was read from.

    `takes` is what a problem may need of it, `details` the family's own choices as names and numbers, `code`
    what its unit is compiled for in CMake's words, `arch` the compute capability that it is tuned for. The
    properties below read these.
    """

    index: int
    name: str
    family: Family
    op: Op = Op.FORWARD
    accuracy: Accuracy = Accuracy.EXACT
    dtype: DType
    arch: int
    code: str = "89"
    head_dim: int
    takes: Takes
    details: tuple[tuple[str, int], ...]
    smem_bytes: int
    ctas_per_sm: int

    def serves(self, asked: Asked) -> bool:
        """Whether it competes where `asked` is asked for.

        FMHA_FWD stands for attention itself: any family's exact forward kernels compete. Others stand for
        their own forward kernels, a precision for those that are as exact, FMHA_BWD for all kernels that
        make gradients. What computes something else is in no choice of attention's.
        """
        if asked is Family.FMHA_BWD:
            return self.op is Op.BACKWARD
        if self.op is not Op.FORWARD:
            return False
        if isinstance(asked, Precision):
            return self.accuracy is asked.accuracy
        if asked is Family.FMHA_FWD:
            return self.accuracy is Accuracy.EXACT
        return self.family is asked

    @functools.cached_property
    def is_for_one_arch(self) -> bool:
        """Its machine code has instructions of one architecture and runs there alone ("90a-real")."""
        return self.code.partition("-")[0].endswith("a")

    def detail(self, name: str, default: int = 0) -> int:
        """The value of a detail, or `default` where the family has none of that name."""
        return dict(self.details).get(name, default)

    @functools.cached_property
    def block_m(self) -> int:
        """Query rows of a CTA's tile."""
        return self.detail("block_m")

    @functools.cached_property
    def block_n(self) -> int:
        """Key rows of a step."""
        return self.detail("block_n")

    @functools.cached_property
    def stages(self) -> int:
        """Steps whose operands are in flight."""
        return self.detail("stages")

    @functools.cached_property
    def warps(self) -> int:
        """Of one CTA."""
        return self.detail("warps")

    @functools.cached_property
    def kv_groups(self) -> int:
        """Warp groups of one CTA that share its query rows and split its keys."""
        return self.detail("kv_groups", 1)

    @functools.cached_property
    def q_in_regs(self) -> bool:
        """Q stays in registers, and its shared memory is reused for V."""
        return bool(self.detail("q_in_regs"))

    @functools.cached_property
    def is_general(self) -> bool:
        """Learns at run time whether it is causal."""
        return Takes.FULL in self.takes and Takes.CAUSAL in self.takes

    @functools.cached_property
    def is_causal(self) -> bool:
        """Computes causal attention only."""
        return Takes.FULL not in self.takes

    @functools.cached_property
    def has_dropout(self) -> bool:
        """Always drops."""
        return Takes.DROPOUT in self.takes

    @functools.cached_property
    def is_split(self) -> bool:
        """Several CTAs may share the keys of its tiles."""
        return Takes.SPLITS in self.takes

    @functools.cached_property
    def packs_heads(self) -> bool:
        """Its tiles hold the rows of all query heads of a key head: split kernels', but for Hopper's."""
        return self.is_split and self.family is not Family.FMHA_FWD_SM90

    @functools.cached_property
    def is_unbiased(self) -> bool:
        """Takes boolean masks, but no bias."""
        return Takes.BOOL in self.takes and Takes.BIAS16 not in self.takes

    @property
    def mask_types(self) -> tuple[MaskType, ...]:
        """The masks that it takes."""
        return tuple(mask for mask in MaskType if TAKES_OF_MASK[mask] in self.takes)

    @property
    def threads(self) -> int:
        """Threads of one CTA."""
        return 32 * self.warps


_DTYPES = (DType.F16, DType.BF16, DType.F32)  # in the order of enum sdpa_dtype
_MASK_TYPES = (None, MaskType.BOOL, MaskType.F16, MaskType.BF16, MaskType.F32)  # and of enum sdpa_mask_type


def dtype_code(dtype: DType) -> int:
    """The C ABI's sdpa_dtype."""
    return _DTYPES.index(dtype)


def mask_code(mask: MaskType | None) -> int:
    """The C ABI's sdpa_mask_type."""
    return _MASK_TYPES.index(mask)


def _takes(bits: int) -> Takes:
    unknown = bits & ~sum(Takes)
    if unknown:
        raise ValueError(f"takes has the bits {unknown:#x}, which this package does not know")
    return Takes(bits)


@functools.cache
def read_kernels(library: Library) -> tuple[KernelInfo, ...]:
    """Every row of `library`, in its order. Raises LibraryMismatchError for a row of unknown meaning."""
    rows = []
    for index in range(library.kernel_count()):
        raw = library.kernel_info(index)
        try:
            row = KernelInfo(
                index=index,
                name=raw.name.decode(),
                family=Family(raw.family.decode()),
                dtype=_DTYPES[raw.dtype],
                op=Op(raw.op),
                accuracy=Accuracy(raw.accuracy),
                arch=raw.arch,
                code=raw.code.decode(),
                head_dim=raw.head_dim,
                takes=_takes(raw.takes),
                details=tuple(
                    (detail.name.decode(), detail.value) for detail in raw.details[: raw.num_details]
                ),
                smem_bytes=raw.smem_bytes,
                ctas_per_sm=raw.ctas_per_sm,
            )
        except (ValueError, IndexError) as error:
            raise LibraryMismatchError(
                f"{library.path}: kernel row {index} is not understood: {error}"
            ) from error
        rows.append(row)
    return tuple(rows)
