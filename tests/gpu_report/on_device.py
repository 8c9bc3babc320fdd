"""Launches one kernel by name on torch tensors of its device: for many launches of the same problem."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from sdpa_cutlass.library.abi import Library
from sdpa_cutlass.library.registry import KernelInfo
from sdpa_cutlass.library.structs import MAX_TILES
from tests.gpu_report.launching import poisoned
from tests.gpu_report.problems import num_splits
from tests.kernels.general import Case, make_case_params


def case_on(case: Case, device: str | torch.device) -> Case:
    """The same case with its tensors on `device`."""
    tensors = {name: getattr(case, name).to(device) for name in ("q", "k", "v")}
    return replace(case, **tensors, mask=None if case.mask is None else case.mask.to(device))


class DeviceLaunch:
    """A kernel and a case on a torch device, with its own results and workspace."""

    def __init__(self, library: Library, row: KernelInfo, case: Case, *, with_lse: bool = True) -> None:
        device = case.q.device
        self.row, self.case = row, case
        self._library, self._index = library, device.index or 0
        self._poison = [poisoned(case.out_shape, case.q.dtype).to(device)]
        if with_lse:
            self._poison.append(poisoned(case.out_shape[:3], torch.float32).to(device))
        self.results = [poison.clone() for poison in self._poison]  # out, and softmax_lse
        out, lse = self.results[0], self.results[1] if with_lse else None
        self.params, self._held = make_case_params(case, out, lse)
        self.params.num_splits = num_splits(row, case)
        reason = library.refusal(row.index, self.params)
        assert reason is None, f"{row.name} refuses {case}: {reason}"
        library.prepare(row.index, self._index)
        size = library.workspace_bytes(row.index, self.params)
        if size:
            workspace = torch.empty(size + 256, dtype=torch.uint8, device=device)
            self._held.append(workspace)
            self.params.workspace = workspace.data_ptr() + -workspace.data_ptr() % 256
            self.params.workspace_bytes = size
        if self.params.num_splits > 1:
            counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
            self._held.append(counters)
            self.params.split_arrivals = counters.data_ptr()

    def forget(self) -> None:
        """Poisons the results."""
        for result, poison in zip(self.results, self._poison, strict=True):
            result.copy_(poison)

    def run(self) -> None:
        """Queues the kernel on torch's current stream of the case's device."""
        stream = None
        if self.case.q.is_cuda:
            stream = torch.cuda.current_stream(self.case.q.device).cuda_stream
        status = self._library.launch_function(self.row.index, ctypes.byref(self.params), self._index, stream)
        self._library.check(status, f"{self.row.name}, {self.case}")

    def bits(self) -> list[torch.Tensor]:
        """The results as integers, which compare bit by bit, NaNs too."""
        integers = {2: torch.int16, 4: torch.int32}
        return [result.view(integers[result.element_size()]) for result in self.results]
