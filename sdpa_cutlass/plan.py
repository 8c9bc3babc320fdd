"""A checked signature bound to its kernel: launching it sets pointers and calls the library, nothing else.

The parameter struct is filled once; every thread launches from its own copy, because ctypes releases the
GIL during the call. Tensors given to `launch` must have exactly the sizes and strides that the plan was
made for, and softmax_lse must be given or not as it was then: the size of a workspace may depend on it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

from ._c_api import Library, Params
from ._locate import Target
from .checks import kernel_strides
from .device import DeviceInfo, check_can_serve, stream_getter
from .problem import Problem
from .registry import KernelInfo, dtype_code

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
) -> Params:
    """The C struct for canonical tensors, without a workspace."""
    heads_rows = problem.num_heads_q * problem.seqlen_q
    return Params(
        struct_size=ctypes.sizeof(Params),
        dtype=dtype_code(problem.dtype),
        batch=problem.batch,
        num_heads_q=problem.num_heads_q,
        num_heads_kv=problem.num_heads_kv,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        head_dim=problem.head_dim,
        is_causal=int(problem.is_causal),
        causal_offset=problem.causal_offset,
        softmax_scale=scale,
        q=query.data_ptr(),
        k=key.data_ptr(),
        v=value.data_ptr(),
        out=out.data_ptr(),
        softmax_lse=None if softmax_lse is None else softmax_lse.data_ptr(),
        q_stride=kernel_strides(query),
        k_stride=kernel_strides(key),
        v_stride=kernel_strides(value),
        out_stride=kernel_strides(out),
        lse_stride=(heads_rows, problem.seqlen_q),
    )


class _ThreadParams(threading.local):
    """One struct per thread, copied from the plan's at the thread's first launch."""

    def __init__(self, template: Params) -> None:
        self.params = Params.from_buffer_copy(template)
        self.pointer = ctypes.byref(self.params)


class Plan:
    """One kernel, one problem, one set of strides, one device."""

    def __init__(
        self, library: Library, kernel: KernelInfo, problem: Problem, params: Params, device: DeviceInfo
    ) -> None:
        self.kernel = kernel
        self.problem = problem
        self.workspace_bytes = library.workspace_bytes(kernel.index, params)
        self._library = library
        self._launch = library.launch_function
        self._index = kernel.index
        self._device = device.index
        self._stream = stream_getter() if device.target is Target.CUDA else None
        self._local = _ThreadParams(params)
        library.prepare(kernel.index, device.index)

    def launch(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor | None,
    ) -> None:
        """Queues the kernel on torch's current stream of the plan's device (host library: runs it).

        `out` [B, Hq, Sq, D] and, unless None, `softmax_lse` [B, Hq, Sq] float32 contiguous are overwritten.
        Raises LaunchError or HostCheckError.
        """
        local = self._local
        params = local.params
        params.q = query.data_ptr()
        params.k = key.data_ptr()
        params.v = value.data_ptr()
        params.out = out.data_ptr()
        params.softmax_lse = None if softmax_lse is None else softmax_lse.data_ptr()
        workspace = self._allocate_workspace(out, params) if self.workspace_bytes else None
        stream = None if self._stream is None else self._stream(self._device)
        status = self._launch(self._index, local.pointer, self._device, stream)
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


@functools.cache
def check_device(library: Library, device: DeviceInfo) -> None:
    """Raises DriverError unless `library` runs on `device`; asked once for each pair."""
    if device.target is Target.CUDA:
        check_can_serve(library.build, device)
