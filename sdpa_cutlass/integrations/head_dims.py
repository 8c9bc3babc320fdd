"""Which head dimensions the kernels of a library serve, for every device that it can use."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from ..call.launch import check_device
from ..choice.backward import largest_head_dim
from ..choice.legal import competing
from ..errors import ArgumentError, DriverError, LibraryError, LibraryNotFoundError
from ..library.abi import Library, library
from ..library.device import HOST, DeviceInfo, cuda_device
from ..library.locate import Target
from ..library.registry import Family
from .usage import logger


class HeadDims(NamedTuple):
    """Which head dimensions a library has fused kernels for."""

    plain: frozenset[int]
    """Those of calls without mask and dropout."""
    general: int
    """The largest with a mask, or where a kernel of a larger head_dim steps in; 0 when there is none."""
    dropout: int
    """The largest with dropout; 0 when there is none."""
    backward: int = 0
    """The largest of inputs that require grad; 0 when there is none."""


def served_head_dims(devices: Collection[str] | None) -> dict[Any, HeadDims]:
    """torch.device → head dimensions with a kernel, for every usable device among `devices`."""
    import torch

    if isinstance(devices, str):
        devices = (devices,)
    unknown = set(devices or ()) - {"cuda", "cpu"}
    if unknown or (devices is not None and not devices):
        raise ArgumentError(f"devices={devices!r}; allowed are 'cuda' and 'cpu'")
    if devices is not None:
        served = cuda_head_dims() if "cuda" in devices else {}
        return (
            {**served, torch.device("cpu"): _head_dims(library(Target.HOST), HOST)}
            if "cpu" in devices
            else served
        )
    try:
        return cuda_head_dims()
    except (DriverError, LibraryError) as error:
        try:
            served = {torch.device("cpu"): _head_dims(library(Target.HOST), HOST)}
        except LibraryNotFoundError as missing:
            raise type(error)(f"{error}\nand no CPU tensors can be served: {missing}") from None
        logger.info("serving CPU tensors through the host library, which is slow: %s", error)
        return served


def cuda_head_dims() -> dict[Any, HeadDims]:
    """As `served_head_dims`, of the GPUs that the library can use. Raises when there is none."""
    import torch

    if not torch.cuda.is_available():
        raise DriverError("torch sees no CUDA device")
    native = library(Target.CUDA)
    served = {}
    refused: DriverError | None = None
    for index in range(torch.cuda.device_count()):
        try:
            device = cuda_device(index)
            check_device(native, device)
        except DriverError as error:
            logger.info("cuda:%d is left to torch: %s", index, error)
            refused = error
        else:
            served[torch.device("cuda", index)] = _head_dims(native, device)
    if not served and refused is not None:
        raise refused
    return served


def _head_dims(native: Library, device: DeviceInfo) -> HeadDims:
    rows = competing(native, Family.FMHA_FWD, device)
    general = [row for row in rows if row.is_general]
    return HeadDims(
        plain=frozenset(row.head_dim for row in rows if not row.is_general),
        general=max((row.head_dim for row in general if not row.has_dropout), default=0),
        dropout=max((row.head_dim for row in general if row.has_dropout), default=0),
        backward=largest_head_dim(native, device),
    )
