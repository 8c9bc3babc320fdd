"""What the driver answers through cuda-python, where there is no driver."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100


class FakeDriver:
    """cuda.bindings.driver with the given functions, each of which gives what follows the status.

    `status` is what every call ends with. `asked` are the calls: name and arguments.
    """

    CUresult = CUresult
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL="ordinal")
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="SMs",
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE="L2",
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE="kHz",
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH="bits",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
    )

    def __init__(
        self, status: CUresult = CUresult.CUDA_SUCCESS, **functions: Callable[..., tuple[Any, ...]]
    ) -> None:
        self.status = status
        self.asked: list[tuple[Any, ...]] = []
        self._functions = functions

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        answer = self._functions[name]

        def ask(*arguments: Any) -> tuple[Any, ...]:
            self.asked.append((name, *arguments))
            return (self.status, *answer(*arguments))

        return ask
