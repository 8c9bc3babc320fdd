"""Launches one kernel by name on one case, with every tensor placed by hand and no torch on the device."""

from __future__ import annotations

import ctypes

import numpy
import torch

from sdpa_cutlass.library.abi import Library
from sdpa_cutlass.library.registry import KernelInfo
from sdpa_cutlass.library.structs import MAX_TILES
from tests.gpu_report.memory import Bytes
from tests.gpu_report.placement import Placement
from tests.gpu_report.problems import num_splits
from tests.kernels.general import Case, make_case_params
from tests.kernels.harness import OUTPUT_POISON

_POINTERS = (
    "q", "k", "v", "mask", "philox_state", "seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip
_WORKSPACE_ALIGNMENT = 256
_ROWS = 16  # bytes: how rows of q, k, v and out are aligned; everything else by its elements
_INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a dense CPU tensor."""
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy()


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """NaNs with a payload that no kernel computes."""
    return torch.full(shape, OUTPUT_POISON[dtype], dtype=_INTEGERS[dtype]).view(dtype)


class Launch:
    """A kernel, a case on the CPU, and where its tensors lie. `run` may be called again and again."""

    def __init__(
        self,
        library: Library,
        row: KernelInfo,
        case: Case,
        placement: Placement,
        *,
        with_lse: bool = True,
        poison_outputs: bool = True,
    ) -> None:
        self._library, self._row, self._case, self._placement = library, row, case, placement
        self._out = poisoned(case.out_shape, case.q.dtype)
        self._lse = poisoned(case.out_shape[:3], torch.float32) if with_lse else None
        self.params, held = make_case_params(case, self._out, self._lse)
        self.params.num_splits = num_splits(row, case)
        reason = library.refusal(row.index, self.params)
        assert reason is None, f"{row.name} refuses {case}: {reason}"
        library.prepare(row.index, 0)
        self._place_inputs(held)
        self._place_outputs(poison_outputs)

    def _place_inputs(self, held: list[torch.Tensor]) -> None:
        case = self._case
        given = [case.q, case.k, case.v, *held, *([] if case.mask is None else [case.mask])]
        at = {tensor.data_ptr(): tensor for tensor in given}
        for field in _POINTERS:
            address = getattr(self.params, field)
            if address:
                tensor = at[address]
                placed = self._placement.put(
                    field,
                    bytes_of(tensor),
                    read_only=True,
                    alignment=_ROWS if field in ("q", "k", "v") else tensor.element_size(),
                )
                setattr(self.params, field, placed)

    def _place_outputs(self, poison: bool) -> None:
        params = self.params
        for field, tensor in (("out", self._out), ("softmax_lse", self._lse)):
            if tensor is None:
                continue
            if poison:
                alignment = _ROWS if field == "out" else tensor.element_size()
                data = bytes_of(tensor)
                address = self._placement.put(field, data, read_only=False, alignment=alignment)
            else:
                address = self._placement.reserve(field, tensor.nbytes, alignment=_ROWS)
            setattr(params, field, address)
        size = self._library.workspace_bytes(self._row.index, params)
        if size:
            params.workspace_bytes = size
            if poison:
                nans = numpy.full(size, 0xFF, numpy.uint8)
                params.workspace = self._placement.put(
                    "workspace", nans, read_only=False, alignment=_WORKSPACE_ALIGNMENT
                )
            else:
                params.workspace = self._placement.reserve("workspace", size, alignment=_WORKSPACE_ALIGNMENT)
        if params.num_splits > 1:
            counters = numpy.zeros(4 * MAX_TILES, numpy.uint8)
            params.split_arrivals = self._placement.put("counters", counters, read_only=False, alignment=4)

    def run(self, stream: int | None = None) -> None:
        """Queues the kernel. Raises what the library reports, naming the kernel and the case."""
        status = self._library.launch_function(self._row.index, ctypes.byref(self.params), 0, stream)
        self._library.check(status, f"{self._row.name}, {self._case}")

    def results(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, softmax_lse) on the CPU, once the device is done."""
        self._placement.memory.synchronize()
        out = torch.from_numpy(self._placement.read("out").copy()).view(self._out.dtype)
        lse = None
        if self._lse is not None:
            lse = torch.from_numpy(self._placement.read("softmax_lse").copy()).view(torch.float32)
            lse = lse.view(self._lse.shape)
        return out.view(self._out.shape), lse

    def untouched(self) -> list[str]:
        """Which results still hold the poison where the kernel had to write, or lost it where it must not."""
        found = []
        unused = self._case.unused_rows()
        for name, tensor in zip(("out", "softmax_lse"), self.results(), strict=True):
            if tensor is None:
                continue
            is_poison = tensor.view(_INTEGERS[tensor.dtype]) == OUTPUT_POISON[tensor.dtype]
            left = int(is_poison[:, :, ~unused].sum())
            lost = int((~is_poison[:, :, unused]).sum())
            if left:
                found.append(f"{left} elements of {name} were never written")
            if lost:
                found.append(f"{lost} elements of {name} that belong to no sequence were written")
        return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(numpy.array_equal(bytes_of(one), bytes_of(other)))
