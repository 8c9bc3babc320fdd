"""Arrays of other libraries: each shows the memory of a tensor or a NumPy array by one protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sdpa_cutlass.arrays import protocols

without_torch = pytest.mark.usefixtures("_without_torch")
"""Arrays find no torch; the tensors of a test are for comparison only."""


class DLPackOnly:
    """An array that speaks nothing but DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


class InterfaceOnly:
    """An array that speaks nothing but __array_interface__."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.array = tensor.numpy()
        self.__array_interface__ = self.array.__array_interface__


class CudaInterfaceOnly:
    """A CUDA tensor behind __cuda_array_interface__, made on `stream`."""

    def __init__(self, tensor: torch.Tensor, stream: int | None = None) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = {**tensor.__cuda_array_interface__, "version": 3, "stream": stream}


KINDS = {"numpy": torch.Tensor.numpy, "DLPack": DLPackOnly, "__array_interface__": InterfaceOnly}


class OlderDLPack(DLPackOnly):
    """Knows nothing of DLPack 1.0."""

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        return self.tensor.__dlpack__()


ALL_KINDS: dict[str, Callable[[torch.Tensor], Any]] = {**KINDS, "DLPack before 1.0": OlderDLPack}


class Numbers:
    """A NumPy array that speaks DLPack only."""

    def __init__(self, numbers: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.numbers, self.device = numbers, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.numbers.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class CudaDLPack(Numbers):
    """Says that it lies on a GPU, and keeps the streams that it was told."""

    def __init__(self, tensor: torch.Tensor, index: int = 0) -> None:
        super().__init__(tensor.numpy(), (2, index))
        self.streams: list[Any] = []

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.streams.append(stream)
        return self.numbers.__dlpack__(**options)


class Immutable(CudaDLPack):
    """As JAX shows an array: the capsule does not say that it must not be written."""

    __cuda_array_interface__ = {"data": (0, True)}  # noqa: RUF012


class Broken(Numbers):
    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("not today")


class Empty(Numbers):
    def __dlpack__(self, **_: Any) -> Any:
        return None


class Edited(Numbers):
    """A NumPy array whose capsule is changed before it is handed out."""

    def __init__(self, numbers: np.ndarray, **fields: int) -> None:
        super().__init__(numbers)
        self.fields = fields

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.numbers.__dlpack__(max_version=(1, 0))
        versioned = protocols._Versioned.from_address(protocols._pointer_of(capsule, b"dltensor_versioned"))
        for name, value in self.fields.items():
            setattr(versioned if hasattr(versioned, name) else versioned.tensor, name, value)
        return capsule


class Interface:
    def __init__(self, **interface: Any) -> None:
        self.__array_interface__ = {**np.zeros((2, 4, 9, 64), np.float16).__array_interface__, **interface}
