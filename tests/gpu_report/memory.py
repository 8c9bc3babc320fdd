"""Memory for one launch at a time: on the host, or on a GPU through the driver alone.

Nothing here runs a kernel of another library, so compute-sanitizer sees copies and this project's kernels
only, and every allocation has exactly the size of its tensor. `fenced` memory has unmapped neighbours: an
access beyond either end faults, even one whose value is thrown away.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Protocol

import numpy

Bytes = Any  # numpy.ndarray of uint8


class Memory(Protocol):
    """What a launch needs of a machine. Addresses are integers."""

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def fenced(self, size: int) -> tuple[int, int]:
        """(address, size) of memory whose both neighbours are unmapped; it lives as long as the process."""

    def write(self, address: int, data: Bytes) -> None: ...
    def read(self, address: int, size: int) -> Bytes: ...
    def synchronize(self) -> None: ...


class HostMemory:
    """Ordinary memory, for the host library."""

    def __init__(self) -> None:
        self._held: dict[int, object] = {}

    def allocate(self, size: int) -> int:
        memory = numpy.empty(size + 256, numpy.uint8)
        address = int(memory.ctypes.data)
        address += -address % 256  # as cudaMalloc aligns
        self._held[address] = memory
        return address

    def free(self, address: int) -> None:
        del self._held[address]

    def fenced(self, size: int) -> tuple[int, int]:
        page = mmap.PAGESIZE
        room = -(-size // page) * page
        memory = mmap.mmap(-1, room + 2 * page)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for fence in (first, first + page + room):
            if protect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._held[first + page] = memory
        return first + page, room

    def write(self, address: int, data: Bytes) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def read(self, address: int, size: int) -> Bytes:
        data = numpy.empty(size, numpy.uint8)
        ctypes.memmove(data.ctypes.data, address, size)
        return data

    def synchronize(self) -> None:
        pass


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a call into cuda.bindings. Raises RuntimeError with the driver's name of the error."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"the CUDA driver says {status.name if hasattr(status, 'name') else status}")
    return values[0] if len(values) == 1 else values or None


class DeviceMemory:
    """Memory of one GPU, in the context that the CUDA runtime uses as well."""

    def __init__(self, index: int = 0) -> None:
        from cuda.bindings import driver

        self._driver = driver
        checked(driver.cuInit(0))
        device = checked(driver.cuDeviceGet(index))
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))
        self._index = index

    def allocate(self, size: int) -> int:
        return int(checked(self._driver.cuMemAlloc(size)))

    def free(self, address: int) -> None:
        checked(self._driver.cuMemFree(address))

    def fenced(self, size: int) -> tuple[int, int]:
        driver = self._driver
        place = properties(driver, self._index)
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        step = int(checked(driver.cuMemGetAllocationGranularity(place, minimum)))
        room = -(-size // step) * step
        address = int(checked(driver.cuMemAddressReserve(room + 2 * step, 0, 0, 0))) + step
        memory = checked(driver.cuMemCreate(room, place, 0))
        checked(driver.cuMemMap(address, room, 0, memory, 0))
        checked(driver.cuMemSetAccess(address, room, [access(driver, self._index)], 1))
        return address, room

    def write(self, address: int, data: Bytes) -> None:
        checked(self._driver.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))

    def read(self, address: int, size: int) -> Bytes:
        data = numpy.empty(size, numpy.uint8)
        checked(self._driver.cuMemcpyDtoH(data.ctypes.data, address, size))
        return data

    def synchronize(self) -> None:
        checked(self._driver.cuCtxSynchronize())


def properties(driver: Any, index: int) -> Any:
    """Plain memory of GPU `index`, for cuMemCreate."""
    place = driver.CUmemAllocationProp()
    place.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    place.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    place.location.id = index
    return place


def access(driver: Any, index: int) -> Any:
    """Reading and writing by GPU `index`, for cuMemSetAccess."""
    allowed = driver.CUmemAccessDesc()
    allowed.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    allowed.location.id = index
    allowed.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return allowed


def memory_of(device: str) -> Memory:
    """The memory of torch device "cpu" or "cuda"."""
    return DeviceMemory() if device == "cuda" else HostMemory()
