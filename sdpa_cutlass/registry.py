"""The registry: one frozen row per kernel, read from the library and never from a second file."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from .errors import LibraryMismatchError
from .problem import DType, MaskType

if TYPE_CHECKING:
    from ._c_api import Library


class Family(Enum):
    """``FMHA_FWD``: the fused kernels. ``UNFUSED``: GEMM → softmax → GEMM, the baseline."""

    FMHA_FWD = "fmha_fwd"
    UNFUSED = "unfused"

    __hash__ = object.__hash__  # Enum's own is Python code: 0.3 µs more in every call's signature


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInfo:
    """One row of the registry. ``index`` is its place in the library that it was read from.

    A plain row has its own head_dim and `is_causal` and nothing else; a row with `is_general` takes causal or
    not, masks, lengths per sequence, and any head dimensions up to its own. One with `is_split` is general
    but takes no masks: its tiles hold the rows of all query heads of a key head, and several CTAs may share
    the keys of a tile. One with `is_unbiased` is general but takes boolean masks only.
    """

    index: int
    name: str
    family: Family
    dtype: DType
    arch: int
    head_dim: int
    block_m: int
    block_n: int
    stages: int
    warps: int
    kv_groups: int
    q_in_regs: bool
    is_causal: bool
    is_general: bool
    has_dropout: bool
    is_split: bool
    is_unbiased: bool
    smem_bytes: int
    ctas_per_sm: int

    @property
    def mask_types(self) -> tuple[MaskType, ...]:
        """The masks that it takes."""
        if not self.is_general or self.is_split:
            return ()
        return (MaskType.BOOL,) if self.is_unbiased else tuple(MaskType)

    @property
    def threads(self) -> int:
        """Threads of one CTA."""
        return 32 * self.warps


_DTYPES = (DType.F16, DType.BF16)  # in the order of enum sdpa_dtype
_MASK_TYPES = (None, MaskType.BOOL, MaskType.F16, MaskType.BF16, MaskType.F32)  # and of enum sdpa_mask_type


def dtype_code(dtype: DType) -> int:
    """The C ABI's sdpa_dtype."""
    return _DTYPES.index(dtype)


def mask_code(mask: MaskType | None) -> int:
    """The C ABI's sdpa_mask_type."""
    return _MASK_TYPES.index(mask)


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
                arch=raw.arch,
                head_dim=raw.head_dim,
                block_m=raw.block_m,
                block_n=raw.block_n,
                stages=raw.stages,
                warps=raw.warps,
                kv_groups=raw.kv_groups,
                q_in_regs=bool(raw.q_in_regs),
                is_causal=bool(raw.is_causal),
                is_general=bool(raw.is_general),
                has_dropout=bool(raw.has_dropout),
                is_split=bool(raw.is_split),
                is_unbiased=bool(raw.is_unbiased),
                smem_bytes=raw.smem_bytes,
                ctas_per_sm=raw.ctas_per_sm,
            )
        except (ValueError, IndexError) as error:
            raise LibraryMismatchError(
                f"{library.path}: kernel row {index} is not understood: {error}"
            ) from error
        rows.append(row)
    return tuple(rows)
