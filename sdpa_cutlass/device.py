"""What the launch and the cost model need to know about a device: its facts, its driver, its current stream.

Facts of GPUs come from the driver, which numbers them as torch does. The host library is modelled as an
NVIDIA L4, so that CPU runs exercise the kernels that an L4 would use.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._c_api import BuildInfo
from ._locate import Target
from .errors import DriverError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device. `mma_flops_per_clock` is per SM, for fp16 mma.sync with fp32 accumulation."""

    target: Target
    index: int
    name: str
    compute_capability: tuple[int, int]
    sms: int
    mma_flops_per_clock: int

    @property
    def smem_per_sm(self) -> int:
        """Bytes of shared memory for all CTAs of an SM (CUDA C++ Programming Guide, compute capabilities)."""
        if self.compute_capability == (8, 0):
            return 167936
        return 233472 if self.compute_capability[0] in (9, 10) else 102400


HOST = DeviceInfo(
    target=Target.HOST,
    index=0,
    name="host (modelled as NVIDIA L4)",
    compute_capability=(8, 9),
    sms=58,
    mma_flops_per_clock=1024,
)


def mma_flops_per_clock(compute_capability: tuple[int, int], name: str) -> int:
    """What mma.sync does on one SM, with fp16 operands and fp32 accumulation."""
    if compute_capability == (8, 0):
        return 2048
    if compute_capability >= (9, 0) and "GeForce" not in name:
        return 2580  # mma.sync reaches 63 % of what wgmma does on an H200
    return 512 if "GeForce" in name else 1024


@functools.cache
def cuda_device(index: int) -> DeviceInfo:
    """Facts of CUDA device `index`. Raises DriverError."""
    _ask("cuInit", 0)
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    _ask("cuDeviceGet", ctypes.byref(handle), index)
    _ask("cuDeviceGetName", name, len(name), handle)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _ask("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
        return value.value

    capability = (attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR))
    return DeviceInfo(
        target=Target.CUDA,
        index=index,
        name=name.value.decode(),
        compute_capability=capability,
        sms=attribute(_MULTIPROCESSOR_COUNT),
        mma_flops_per_clock=mma_flops_per_clock(capability, name.value.decode()),
    )


_MULTIPROCESSOR_COUNT, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76  # CUdevice_attribute
_DEVICE_ORDINAL = 9  # CUpointer_attribute
_DISABLE_TIMING = 2  # CUevent_flags


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _ask(function: str, *arguments: Any) -> None:
    """Calls the driver. Raises DriverError unless it succeeds."""
    try:
        error = getattr(_driver(), function)(*arguments)
    except OSError:
        raise DriverError("no NVIDIA driver was found (libcuda.so.1)") from None
    if error:
        raise DriverError(f"{function} failed with CUDA driver error {error}")


def pointer_device(address: int) -> int:
    """The device whose memory `address` is in. Raises DriverError when CUDA does not know the address."""
    _ask("cuInit", 0)
    index = ctypes.c_int()
    _ask("cuPointerGetAttribute", ctypes.byref(index), _DEVICE_ORDINAL, ctypes.c_uint64(address))
    return index.value


def wait_for(stream: int, producer: int, device: int) -> None:
    """What is queued on `stream` of `device` from now on runs after what is on `producer` now."""
    event, previous = ctypes.c_void_p(), ctypes.c_void_p()
    _ask("cuCtxPushCurrent_v2", _primary_context(device))
    try:
        _ask("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        try:
            _ask("cuEventRecord", event, ctypes.c_void_p(producer))
            _ask("cuStreamWaitEvent", ctypes.c_void_p(stream), event, 0)
        finally:
            _ask("cuEventDestroy_v2", event)  # once it has happened
    finally:
        _ask("cuCtxPopCurrent_v2", ctypes.byref(previous))


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """The context that the CUDA runtime uses on `device`, kept for good as the runtime keeps it."""
    _ask("cuInit", 0)
    context = ctypes.c_void_p()
    _ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def driver_version() -> int | None:
    """The newest CUDA that the installed driver supports, as an integer (13000), or None without a driver."""
    try:
        driver = _driver()
    except OSError:
        return None
    version = ctypes.c_int()
    status = driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value if status == 0 else None


def archs_serve(archs: str, compute_capability: tuple[int, int]) -> bool:
    """True when a library built for CMake's `archs` list ("89;90-real") has code for this compute capability.

    Machine code runs on the same major version with an equal or higher minor one; PTX on anything newer.
    """
    for arch in archs.replace(",", ";").split(";"):
        number, _, kind = arch.strip().partition("-")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        built = (int(digits) // 10, int(digits) % 10)
        if digits != number:
            if built == compute_capability:
                return True
        elif built <= compute_capability and (kind != "real" or built[0] == compute_capability[0]):
            return True
    return False


def check_can_serve(build: BuildInfo, device: DeviceInfo) -> None:
    """Raises DriverError unless the driver and the GPU can run the CUDA library `build`."""
    needed = build.cuda_runtime_version // 1000
    found = driver_version()
    if found is None:
        raise DriverError(f"no NVIDIA driver was found (libcuda.so.1); the library needs CUDA {needed}")
    if found // 1000 < needed:
        raise DriverError(
            f"the NVIDIA driver supports CUDA {found // 1000}.{found % 1000 // 10}; the library was built "
            f"with CUDA {needed} and needs a newer driver{' (580 or later)' if needed == 13 else ''}"
        )
    if not archs_serve(build.archs, device.compute_capability):
        major, minor = device.compute_capability
        raise DriverError(
            f"{device.name} has compute capability {major}.{minor}; the library was built for "
            f"{build.archs!r}. Build it with -DSDPA_CUDA_ARCHS={major}{minor}"
        )


@functools.lru_cache(maxsize=1)
def stream_getter() -> Callable[[int], int]:
    """A function from device index to the handle of torch's current stream on it."""
    import torch

    raw: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return raw
    return lambda index: int(torch.cuda.current_stream(index).cuda_stream)
