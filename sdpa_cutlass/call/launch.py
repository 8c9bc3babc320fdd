"""A checked signature bound to its kernel: launching it writes addresses and calls the library, nothing else.

The library checks the problem once and keeps it as a plan of its own; a launch makes the bytes of its
addresses and hands them over. Nothing that a call writes is shared, so any thread may launch any plan at any
time, which matters because ctypes releases the GIL during the call. Tensors given to `launch` must have
exactly the sizes and strides that the plan was made for; softmax_lse and every extra must be given or not as
they were then.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Sequence
from ctypes import c_void_p
from typing import TYPE_CHECKING, Any

from ..dropout import PhiloxState
from ..library import launcher
from ..library.abi import Library, library
from ..library.device import HOST, DeviceInfo, check_can_serve, cuda_device, stream_getter
from ..library.locate import Target
from ..library.registry import KernelInfo, dtype_code, mask_code
from ..library.structs import Addresses, Params
from ..problem import Problem
from .extras import MASK_TYPES, NO_EXTRAS, Extras
from .operands import dtype_name

if TYPE_CHECKING:
    import torch

_WORKSPACE_ALIGNMENT = 256

# sdpa_addresses in pieces: struct_size and what is reserved, the words from q to workspace_bytes, the rest.
_HEAD, _REST = Addresses.q.offset, Addresses.split_arrivals.offset
_SIZE = ctypes.sizeof(Addresses)
_pack = struct.Struct(f"{_HEAD}s7P{_SIZE - _REST}s").pack  # P, not Q: 0.05 µs less
_pack_rest = struct.Struct("10P").pack  # split_arrivals, and what `_extra_words` gives
_head = struct.pack("II", _SIZE, 0)
# sdpa_params: sizes and scale; addresses; strides; the mask; p_dropout; options; the rest; sinks; nothing
# quantised. To set its fields one by one takes ctypes three times as long.
_PARAMS_SIZE = ctypes.sizeof(Params)
_pack_params = struct.Struct("I10if 6PQP 14q P4q if 2Q5P 8iP 16x").pack
_NO_WORKSPACE = (0, 0, 0)  # workspace, workspace_bytes, split_arrivals
_NO_STRIDES = (0, 0, 0, 0)
# The same words in sdpa_params: mask, and from philox_seed on the others.
_WORD, _MASK, _PHILOX, _TOTALS = 8, Params.mask.offset, Params.philox_seed.offset, Params.total_q.offset
_SINKS = Params.sinks.offset

_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, in each thread another stream
_MAX_STREAMS = 1024
_streams: dict[int, c_void_p] = {}  # never changed once made, so threads may share them


def make_params(
    problem: Problem,
    scale: float,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor | None,
    extras: Extras = NO_EXTRAS,
) -> Params:
    """The C struct for canonical, loadable tensors, without a workspace.

    Packed sequences (`extras.cu_seqlens_q`) are one batch here: q and out [1, Hq, total_q, D], k and v
    alike; their softmax_lse is [Hq, total_q].
    """
    is_packed = extras.cu_seqlens_q is not None
    lse_rows = query.shape[2] if is_packed else problem.seqlen_q
    mask, *options, sinks = _extra_words(extras)
    left, right = problem.window or (-1, -1)
    return Params.from_buffer_copy(
        _pack_params(
            _PARAMS_SIZE,
            dtype_code(problem.dtype),
            problem.batch,
            problem.num_heads_q,
            problem.num_heads_kv,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.head_dim,
            problem.head_dim_v,
            problem.is_causal,
            problem.causal_offset,
            scale,
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
            0 if softmax_lse is None else softmax_lse.data_ptr(),
            *_NO_WORKSPACE,
            *strides(query.shape, query.stride()),
            *strides(key.shape, key.stride()),
            *strides(value.shape, value.stride()),
            *strides(out.shape, out.stride()),
            problem.num_heads_q * lse_rows,
            lse_rows,
            mask,
            *(_NO_STRIDES if extras.mask is None else extras.mask.stride()),
            mask_code(problem.mask),
            extras.p_dropout,
            *options,
            query.shape[2] if is_packed else 0,
            key.shape[2] if is_packed else 0,
            problem.has_lengths and problem.is_bottom_right,
            0,
            problem.window is not None,
            left,
            right,
            0 if extras.sinks is None else mask_code(MASK_TYPES[dtype_name(extras.sinks)]),
            sinks,
        )
    )


def strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, int, int]:
    """Strides of batch, head and row in elements; a dimension of size 1 gets the dense one."""
    batches, heads, rows, dense = shape
    batch, head, row, _ = stride
    if rows < 2:
        row = dense
    if heads < 2:
        head = max(dense, row * rows)
    if batches < 2:
        batch = max(dense, row * rows, head * heads)
    return batch, head, row


def _extra_words(extras: Extras) -> tuple[int, ...]:
    """`extras` in the order of sdpa_addresses: the mask, abi.OPTIONS, sinks; 0 for what is not given."""
    mask, _, philox, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, sinks = extras
    seed = offset = state = 0
    if isinstance(philox, PhiloxState):
        seed, offset = philox
    elif philox is not None:
        state = philox.data_ptr()
    return (
        0 if mask is None else mask.data_ptr(),
        seed,
        offset,
        state,
        0 if seqlens_q is None else seqlens_q.data_ptr(),
        0 if seqlens_k is None else seqlens_k.data_ptr(),
        0 if cu_seqlens_q is None else cu_seqlens_q.data_ptr(),
        0 if cu_seqlens_k is None else cu_seqlens_k.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
    )


class Plan:
    """One kernel, one problem, one set of strides, one device."""

    def __init__(
        self, library: Library, kernel: KernelInfo, problem: Problem, params: Params, device: DeviceInfo
    ) -> None:
        self.kernel = kernel
        self.problem = problem
        self.num_splits = params.num_splits
        self.params = image = bytes(params)
        self.library = library
        self.device = device
        self._native = library.make_plan(kernel.index, params, device.index)
        self.workspace_bytes = self._native.workspace_bytes
        self._ready = (
            library.launch_plan,
            self._native.address,
            stream_getter() if device.target is Target.CUDA else None,
            device.index,
            self.workspace_bytes,
            bytes(_WORD)
            + image[_MASK : _MASK + _WORD]
            + image[_PHILOX:_TOTALS]
            + image[_SINKS : _SINKS + _WORD],
        )

    def launch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor | None,
        extras: Extras | None = None,
    ) -> None:
        """Queues the kernel on torch's current stream of the plan's device (host library: runs it).

        `out` [B, Hq, Sq, Dv] and, unless None, `softmax_lse` [B, Hq, Sq] float32 contiguous are overwritten.
        Without `extras`, those of `make_params` are used again. Raises LaunchError or HostCheckError.
        """
        rest = None if extras is None else _pack_rest(0, *_extra_words(extras))
        self.launch_at(query.data_ptr(), key.data_ptr(), value.data_ptr(), out, softmax_lse, rest)

    def launch_at(
        self,
        query: int,
        key: int,
        value: int,
        out: torch.Tensor,
        softmax_lse: torch.Tensor | None,
        rest: bytes | None = None,
    ) -> None:
        """`launch` for callers that have the addresses. `rest`: sdpa_addresses from split_arrivals on."""
        launch, native, current_stream, device, workspace_bytes, known_rest = self._ready
        workspace, address, handle, stream = None, 0, 0, None
        if current_stream is not None:
            handle = current_stream(device)
            stream = _streams.get(handle)
            if stream is None:
                stream = _keep_stream(handle)
        if workspace_bytes:
            workspace, address = self._make_workspace(out, handle)
        lse = 0 if softmax_lse is None else softmax_lse.data_ptr()
        addresses = _pack(
            _head, query, key, value, out.data_ptr(), lse, address, workspace_bytes, rest or known_rest,
        )  # fmt: skip
        status = launch(native, addresses, stream)
        del workspace  # torch's allocator reuses it in stream order
        if status:
            self.library.check(status, str(self))

    def __str__(self) -> str:
        return f"{self.kernel.name} on {self.problem}"

    @functools.cached_property
    def launcher(self) -> Any:
        """A Launcher of this kernel with the extras of `make_params`, or None: see launcher.py.

        Made when it is first asked for: most plans of a key cache that grows launch once.
        """
        *_, workspace_bytes, rest = self._ready
        addresses = _pack(_head, 0, 0, 0, 0, 0, 0, workspace_bytes, rest)
        make_workspace = self._make_workspace if workspace_bytes else None
        return launcher.make_launcher(
            self.library, str(self), self._native, self.device, addresses, make_workspace
        )

    def _make_workspace(self, out: torch.Tensor, stream: int) -> tuple[torch.Tensor, int]:
        return make_workspace(self.workspace_bytes, out.device, stream)


def make_workspace(size: int, device: torch.device, stream: int) -> tuple[torch.Tensor, int]:
    """A tensor to keep until the launch is queued on `stream`, and the address of `size` bytes in it."""
    torch = sys.modules["torch"]
    size += _WORKSPACE_ALIGNMENT
    if stream == _PER_THREAD_STREAM:
        workspace = _empty_on_own_stream(size, device)
    else:
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
    address = workspace.data_ptr()
    return workspace, address + -address % _WORKSPACE_ALIGNMENT


def _empty_on_own_stream(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes for the calling thread's default stream, given to no other before that stream has passed.

    torch's allocator goes by handles, and this stream's is the same in every thread. So the bytes come from
    those of another stream, and an event of this one, recorded when they are freed, says when they are free.
    """
    torch = sys.modules["torch"]
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():  # then they belong to the graph
            return torch.empty(size, dtype=torch.uint8, device=device)
        with torch.cuda.stream(_stream_to_allocate_on(device.index)):
            workspace = torch.empty(size, dtype=torch.uint8, device=device)
        workspace.record_stream(torch.cuda.current_stream(device))
    return workspace


@functools.cache
def _stream_to_allocate_on(device: int) -> torch.cuda.Stream:
    return sys.modules["torch"].cuda.Stream(device)


def _keep_stream(handle: int) -> c_void_p:
    """The stream `handle` as ctypes passes it. Making it anew in each call would take 0.1 µs."""
    if len(_streams) >= _MAX_STREAMS:
        _streams.clear()
    return _streams.setdefault(handle, c_void_p(handle))


def library_for(tensor: torch.Tensor) -> tuple[Library, DeviceInfo]:
    """The library and the device that serve `tensor`. Raises LibraryError or DriverError when they cannot."""
    if tensor.device.type == "cpu":
        return library(Target.HOST), HOST
    found, device = library(Target.CUDA), cuda_device(tensor.device.index)
    check_device(found, device)
    return found, device


@functools.cache
def check_device(library: Library, device: DeviceInfo) -> None:
    """Raises DriverError unless `library` runs on `device`; asked once for each pair."""
    if device.target is Target.CUDA:
        check_can_serve(library.build, device)
