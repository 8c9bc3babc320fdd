"""One problem for a general kernel, and running it on guarded tensors.

    O = dropout(softmax(Q Kᵀ · scale + mask)) V      over the rows and keys of each sequence

The C struct is filled here and not by the runtime, so that what the runtime never asks for is tested too.
Packed tensors [total, heads, head_dim] are written [1, heads, total, head_dim], in any order in memory.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

from sdpa_cutlass.dropout import PhiloxState
from sdpa_cutlass.library.structs import MAX_TILES, Params
from sdpa_cutlass.problem import Causal
from sdpa_cutlass.public.api import library_for
from tests.kernels.harness import INPUT_POISON, OUTPUT_POISON, SPARE_ROWS, Guarded, TestedKernel

WORKSPACE_ALIGNMENT = 256
_ROOM_GUARD = 1024  # bytes around a workspace, counters around the counters
_NAN_BYTE = 0xFF  # four of them are a NaN
_COUNTER_POISON = -0x1BADBEEF
_DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1}  # enum sdpa_dtype
_ZERO_STATE = PhiloxState(0, 0)
_MASK_CODES = {torch.bool: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}  # enum sdpa_mask_type


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Where one sequence of a batch lies in q and out, or in k and v."""

    index: int  # of the batch dimension
    first_row: int
    num_rows: int  # rows that belong to it
    length: int  # the first rows of them that count


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What the kernel is told about the lengths on one side: per sequence, packed, both or nothing."""

    seqlens: tuple[int, ...] | None = None
    cu_seqlens: tuple[int, ...] | None = None
    longest: int | None = None  # the bound on packed lengths; their maximum when None

    def sequences(self, batch: int, rows: int) -> list[Sequence]:
        """The sequences in tensors of `rows` rows, with lengths cut to what is there."""
        found = []
        for b in range(batch):
            first, end = (0, rows) if self.cu_seqlens is None else self.cu_seqlens[b : b + 2]
            length = end - first if self.seqlens is None else max(0, min(self.seqlens[b], end - first))
            index = b if self.cu_seqlens is None else 0
            found.append(Sequence(index=index, first_row=first, num_rows=end - first, length=length))
        return found

    def bound(self, rows: int) -> int:
        """The `seqlen` of the C struct."""
        if self.cu_seqlens is None:
            return rows
        starts, ends = self.cu_seqlens, self.cu_seqlens[1:]
        return self.longest or max(end - start for start, end in zip(starts, ends, strict=False))


@dataclass(frozen=True, kw_only=True)
class Case:
    """q, k, v [B, H, S, D] or packed, on a kernel's device, and everything a general kernel takes besides."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: Causal | None = None
    scale: float | None = None
    mask: torch.Tensor | None = None  # broadcasts to [B, Hq, Sq, Sk]
    lengths_q: Lengths = Lengths()
    lengths_k: Lengths = Lengths()
    p_dropout: float = 0.0
    philox: PhiloxState = _ZERO_STATE
    philox_on_device: bool = False
    window: tuple[int, int] | None = None
    sinks: torch.Tensor | None = None  # [Hq]

    @property
    def batch(self) -> int:
        for lengths in (self.lengths_q, self.lengths_k):
            if lengths.cu_seqlens is not None:
                return len(lengths.cu_seqlens) - 1
        return self.q.shape[0]

    @property
    def has_lengths(self) -> bool:
        return self.lengths_q != Lengths() or self.lengths_k != Lengths()

    @property
    def seqlen_q(self) -> int:
        return self.lengths_q.bound(self.q.shape[2])

    @property
    def seqlen_k(self) -> int:
        return self.lengths_k.bound(self.k.shape[2])

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (*self.q.shape[:3], self.v.shape[3])

    @property
    def is_bottom_right(self) -> bool:
        return self.causal is Causal.BOTTOM_RIGHT or (self.causal is None and self.window is not None)

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[3]) if self.scale is None else self.scale

    @property
    def sequences(self) -> list[tuple[Sequence, Sequence]]:
        """Of q and of k, for every b."""
        pairs = (
            self.lengths_q.sequences(self.batch, self.q.shape[2]),
            self.lengths_k.sequences(self.batch, self.k.shape[2]),
        )
        return list(zip(*pairs, strict=True))

    @property
    def full_mask(self) -> torch.Tensor | None:
        """The mask as a view of its full shape."""
        if self.mask is None:
            return None
        return self.mask.expand(self.batch, self.q.shape[1], self.seqlen_q, self.seqlen_k)

    def unused_rows(self) -> torch.Tensor:
        """Rows of q and out, True for those that belong to no sequence: kernels leave them alone."""
        unused = torch.ones(self.q.shape[2], dtype=torch.bool)
        for q, _ in self.sequences:
            unused[q.first_row : q.first_row + q.num_rows] = False
        return unused

    def __str__(self) -> str:
        parts = [f"q {tuple(self.q.shape)}, k {tuple(self.k.shape)}, v {tuple(self.v.shape)}, {self.causal}"]
        parts.append(f"scale {self.scale}")
        if self.mask is not None:
            parts.append(f"mask {self.mask.dtype} {tuple(self.mask.shape)} strides {self.mask.stride()}")
        for side, lengths in (("q", self.lengths_q), ("k", self.lengths_k)):
            if lengths != Lengths():
                parts.append(f"{side}: {lengths}")
        if self.p_dropout:
            parts.append(f"p_dropout {self.p_dropout}, {self.philox}")
        if self.window is not None:
            parts.append(f"window {self.window}")
        if self.sinks is not None:
            parts.append(f"sinks {self.sinks.dtype} {self.sinks.tolist()}")
        return ", ".join(parts)


def random_tensor(
    kernel: TestedKernel,
    shape: tuple[int, ...],
    *,
    seed: int,
    bshd: bool = False,
    spare_columns: int = 0,
    spare_rows: int = SPARE_ROWS,
) -> torch.Tensor:
    """Seeded normal values in the kernel's dtype, in guarded memory."""
    guarded = Guarded(
        shape,
        kernel.dtype,
        kernel.device,
        poison=INPUT_POISON[kernel.dtype],
        spare_rows=spare_rows,
        spare_columns=spare_columns,
        bshd=bshd,
    )
    guarded.tensor.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return guarded.tensor


def random_qkv(
    kernel: TestedKernel,
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int = 2,
    heads: int = 2,
    heads_kv: int = 1,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    bshd: bool = False,
    spare_columns: int = 0,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """q, k and v as keywords of a Case. bf16 values of V are scaled by 1/8, as in harness.random_inputs."""
    head_dim = kernel.info.head_dim if head_dim is None else head_dim
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    shapes = {
        "q": (batch, heads, seqlen_q, head_dim),
        "k": (batch, heads_kv, seqlen_k, head_dim),
        "v": (batch, heads_kv, seqlen_k, head_dim_v),
    }
    tensors = {
        name: random_tensor(kernel, shape, seed=3 * seed + i, bshd=bshd, spare_columns=spare_columns)
        for i, (name, shape) in enumerate(shapes.items())
    }
    if kernel.dtype is torch.bfloat16:
        tensors["v"].mul_(0.125)
    return tensors


def random_sinks(
    kernel: TestedKernel, heads: int, dtype: torch.dtype, spread: float = 1.0, *, seed: int = 0
) -> torch.Tensor:
    """A seeded normal logit of each head, `spread` apart."""
    values = torch.randn(heads, generator=torch.Generator().manual_seed(seed)) * spread
    return values.to(kernel.device, dtype)


def run_case(
    kernel: TestedKernel, case: Case, *, with_lse: bool = True, bshd: bool = False, spare_columns: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, softmax_lse) in the shapes of q. Fails when the kernel writes outside them, or not all of them.

    Rows of packed tensors that belong to no sequence are left as they were, NaN.
    """
    unused = case.unused_rows()
    out = Guarded(
        case.out_shape,
        kernel.dtype,
        kernel.device,
        poison=OUTPUT_POISON[kernel.dtype],
        spare_rows=SPARE_ROWS,
        spare_columns=spare_columns,
        bshd=bshd,
        unused=unused,
    )
    lse = Guarded(
        case.out_shape[:3],
        torch.float32,
        kernel.device,
        poison=OUTPUT_POISON[torch.float32],
        unused=unused,
    )
    target = lse.tensor if with_lse else None
    launch(kernel, *make_case_params(case, out.tensor, target))
    out.check_untouched("out")
    out.check_written("out")
    lse.check_untouched("softmax_lse")
    if with_lse:
        lse.check_written("softmax_lse")
    return out.tensor, target


def make_case_params(
    case: Case, out: torch.Tensor, lse: torch.Tensor | None
) -> tuple[Params, list[torch.Tensor]]:
    """The C struct, and the tensors that have to live as long as it is used."""
    held: list[torch.Tensor] = []

    def on_device(values: tuple[int, ...] | None, dtype: torch.dtype = torch.int32) -> int | None:
        if values is None:
            return None
        held.append(torch.tensor(values, dtype=dtype, device=case.q.device))
        return held[-1].data_ptr()

    params = Params(
        struct_size=ctypes.sizeof(Params),
        dtype=_DTYPE_CODES[case.q.dtype],
        batch=case.batch,
        num_heads_q=case.q.shape[1],
        num_heads_kv=case.k.shape[1],
        seqlen_q=case.seqlen_q,
        seqlen_k=case.seqlen_k,
        head_dim=case.q.shape[3],
        head_dim_v=case.v.shape[3],
        is_causal=int(case.causal is not None),
        causal_offset=case.seqlen_k - case.seqlen_q if case.is_bottom_right else 0,
        causal_bottom_right=int(case.has_lengths and case.is_bottom_right),
        softmax_scale=case.softmax_scale,
        q=case.q.data_ptr(),
        k=case.k.data_ptr(),
        v=case.v.data_ptr(),
        out=out.data_ptr(),
        softmax_lse=None if lse is None else lse.data_ptr(),
        q_stride=case.q.stride()[:3],
        k_stride=case.k.stride()[:3],
        v_stride=case.v.stride()[:3],
        out_stride=out.stride()[:3],
        lse_stride=(0, 0) if lse is None else lse.stride()[:2],
        seqlens_q=on_device(case.lengths_q.seqlens),
        seqlens_k=on_device(case.lengths_k.seqlens),
        cu_seqlens_q=on_device(case.lengths_q.cu_seqlens),
        cu_seqlens_k=on_device(case.lengths_k.cu_seqlens),
        total_q=case.q.shape[2],
        total_k=case.k.shape[2],
        p_dropout=case.p_dropout,
    )
    mask = case.full_mask
    if mask is not None:
        params.mask = mask.data_ptr()
        params.mask_stride = mask.stride()
        params.mask_type = _MASK_CODES[mask.dtype]
    if case.window is not None:
        params.has_window, params.window_left, params.window_right = 1, *case.window
    if case.sinks is not None:
        params.sinks, params.sinks_type = case.sinks.data_ptr(), _MASK_CODES[case.sinks.dtype]
    if case.philox_on_device:
        signed = tuple(value - 2**64 if value >= 2**63 else value for value in case.philox)
        params.philox_state = on_device(signed, torch.int64)
    else:
        params.philox_seed, params.philox_offset = case.philox
    return params, held


def refusal_of(kernel: TestedKernel, case: Case, **changes: int) -> str | None:
    """Why the library does not run `case` with these fields of sdpa_params; None when it does."""
    params, _held = make_case_params(case, torch.empty_like(case.q), None)
    params.num_splits = kernel.num_splits
    for name, value in changes.items():
        setattr(params, name, value)
    return kernel.library.refusal(kernel.info.index, params)


class SplitRoom:
    """A workspace of NaNs, and counters of zero where the CTAs of a split kernel meet, both guarded."""

    def __init__(self, device: str, workspace_bytes: int) -> None:
        self._size = workspace_bytes
        self._workspace = torch.full((2 * _ROOM_GUARD + workspace_bytes,), _NAN_BYTE, dtype=torch.uint8)
        self._workspace = self._workspace.to(device)
        start = self._workspace.data_ptr() + _ROOM_GUARD
        self._offset = _ROOM_GUARD + -start % WORKSPACE_ALIGNMENT
        self.workspace = self._workspace.data_ptr() + self._offset
        around = torch.full((MAX_TILES + 2 * _ROOM_GUARD,), _COUNTER_POISON, dtype=torch.int32, device=device)
        self.counters = around[_ROOM_GUARD : _ROOM_GUARD + MAX_TILES].zero_()
        self.arrivals = self.counters.data_ptr()
        self._counters, self._expected = around, around.clone()

    def check(self, what: str) -> None:
        """Fails unless all counters are 0 again and nothing was written around workspace and counters."""
        changed = (self._counters != self._expected).nonzero().flatten() - _ROOM_GUARD
        assert not len(changed), f"{what}: counters {changed.tolist()} are not what they were"
        around = (self._workspace[: self._offset], self._workspace[self._offset + self._size :])
        assert all((part == _NAN_BYTE).all() for part in around), f"{what}: writes around the workspace"


def launch(
    kernel: TestedKernel, params: Params, held: list[torch.Tensor], *, gives_room: bool = True
) -> None:
    """Runs the kernel and waits for it; `held` are the tensors behind the pointers of `params`.

    Split kernels get `kernel.num_splits`; what takes a workspace gets a SplitRoom unless `params` has one, or
    without `gives_room`.
    """
    library, device = library_for(torch.empty(0, device=kernel.device))
    index = kernel.info.index
    params.num_splits = kernel.num_splits
    reason = library.refusal(index, params)
    assert reason is None, f"{kernel}: {reason}"
    room = None
    if gives_room and not params.workspace and library.workspace_bytes(index, params):
        params.workspace_bytes = library.workspace_bytes(index, params)
        room = SplitRoom(kernel.device, params.workspace_bytes)
        params.workspace, params.split_arrivals = room.workspace, room.arrivals
    library.prepare(index, device.index)
    stream = torch.cuda.current_stream().cuda_stream if kernel.device == "cuda" else None
    status = library.launch_function(index, ctypes.byref(params), device.index, stream)
    library.check(status, str(kernel))
    if kernel.device == "cuda":
        torch.cuda.synchronize()
    if room is not None:
        room.check(str(kernel))
    del held
