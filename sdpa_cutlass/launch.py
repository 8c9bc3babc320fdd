"""A checked signature bound to its kernel: launching it sets pointers and calls the library, nothing else.

The parameter struct is filled once; every thread launches from its own copy, because ctypes releases the
GIL during the call. Tensors given to `launch` must have exactly the sizes and strides that the plan was
made for, and softmax_lse and every extra must be given or not as they were then.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from ctypes import c_int, c_void_p
from typing import TYPE_CHECKING, Any

from ._c_api import Library, Params, library
from ._locate import Target
from .checks import kernel_strides
from .device import HOST, DeviceInfo, check_can_serve, cuda_device, stream_getter
from .dropout import PhiloxState
from .extras import NO_EXTRAS, Extras
from .problem import Causal, Problem
from .registry import KernelInfo, dtype_code, mask_code

if TYPE_CHECKING:
    import torch

_WORKSPACE_ALIGNMENT = 256


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
    params = Params(
        struct_size=ctypes.sizeof(Params),
        dtype=dtype_code(problem.dtype),
        batch=problem.batch,
        num_heads_q=problem.num_heads_q,
        num_heads_kv=problem.num_heads_kv,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        is_causal=int(problem.is_causal),
        causal_offset=problem.causal_offset,
        softmax_scale=scale,
        q=query.data_ptr(),
        k=key.data_ptr(),
        v=value.data_ptr(),
        out=out.data_ptr(),
        softmax_lse=_address(softmax_lse),
        q_stride=kernel_strides(query),
        k_stride=kernel_strides(key),
        v_stride=kernel_strides(value),
        out_stride=kernel_strides(out),
        lse_stride=(problem.num_heads_q * lse_rows, lse_rows),
        mask_type=mask_code(problem.mask),
        p_dropout=extras.p_dropout,
        total_q=query.shape[2] if is_packed else 0,
        total_k=key.shape[2] if is_packed else 0,
        causal_bottom_right=int(problem.has_lengths and problem.causal is Causal.BOTTOM_RIGHT),
    )
    if extras.mask is not None:
        params.mask_stride = extras.mask.stride()
    _set_extras(params, extras)
    return params


def _set_extras(params: Params, extras: Extras) -> None:
    """What changes from call to call; what is not given was not given before either."""
    mask, _, philox, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k = extras
    if mask is not None:
        params.mask = mask.data_ptr()
    if philox is not None:
        if isinstance(philox, PhiloxState):
            params.philox_seed, params.philox_offset = philox
            params.philox_state = None
        else:
            params.philox_state = philox.data_ptr()
    if seqlens_q is not None:
        params.seqlens_q = seqlens_q.data_ptr()
    if seqlens_k is not None:
        params.seqlens_k = seqlens_k.data_ptr()
    if cu_seqlens_q is not None:
        params.cu_seqlens_q = cu_seqlens_q.data_ptr()
    if cu_seqlens_k is not None:
        params.cu_seqlens_k = cu_seqlens_k.data_ptr()


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class _ThreadArguments(threading.local):
    """What one thread launches with, made at its first launch: a copy of the plan's struct among it."""

    def __init__(self, template: Params, index: int, device: int) -> None:
        params, stream = Params.from_buffer_copy(template), c_void_p()
        arguments = (c_int(index), ctypes.byref(params), c_int(device), stream)
        self.all = params, stream, arguments


class Plan:
    """One kernel, one problem, one set of strides, one device."""

    def __init__(
        self, library: Library, kernel: KernelInfo, problem: Problem, params: Params, device: DeviceInfo
    ) -> None:
        self.kernel = kernel
        self.problem = problem
        self.workspace_bytes = library.workspace_bytes(kernel.index, params)
        self._library = library
        self._launch = library.untyped_launch
        self._device = device.index
        self._stream = stream_getter() if device.target is Target.CUDA else None
        self._local = _ThreadArguments(params, kernel.index, device.index)
        library.prepare(kernel.index, device.index)

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
        if extras is not None:
            _set_extras(self._local.all[0], extras)
        self.launch_at(query.data_ptr(), key.data_ptr(), value.data_ptr(), out, softmax_lse)

    def launch_at(
        self, query: int, key: int, value: int, out: torch.Tensor, softmax_lse: torch.Tensor | None
    ) -> None:
        """`launch` for callers that have the inputs' addresses at hand."""
        params, stream, arguments = self._local.all
        params.q = query
        params.k = key
        params.v = value
        params.out = out.data_ptr()
        if softmax_lse is not None:
            params.softmax_lse = softmax_lse.data_ptr()
        workspace = self._allocate_workspace(out, params) if self.workspace_bytes else None
        if self._stream is not None:
            stream.value = self._stream(self._device)
        status = self._launch(*arguments)
        del workspace  # torch's allocator reuses it in stream order
        if status:
            self._library.check(status, f"{self.kernel.name} on {self.problem}")

    def _allocate_workspace(self, out: torch.Tensor, params: Params) -> Any:
        torch = sys.modules["torch"]
        size = self.workspace_bytes + _WORKSPACE_ALIGNMENT
        workspace = torch.empty(size, dtype=torch.uint8, device=out.device)
        address = workspace.data_ptr()
        params.workspace = address + -address % _WORKSPACE_ALIGNMENT
        params.workspace_bytes = self.workspace_bytes
        return workspace


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
