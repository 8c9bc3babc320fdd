"""What the launch and the cost model need to know about a device: its facts, its driver, its current stream.

Facts of GPUs come from the driver by way of cuda-python; it numbers them as torch does. The host library is
modelled as an NVIDIA L4, so that CPU runs exercise the kernels that an L4 would use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import DriverError
from .target import Target

if TYPE_CHECKING:
    from .abi import BuildInfo


DRAM_SHARE = 0.93
"""Of the DRAM's bandwidth, for a kernel that reads: decoding reached up to 4.5 of 4.8 TB/s on an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device. `mma_flops_per_clock` is per SM, for fp16 mma.sync with fp32 accumulation.

    `l2_bytes` is the size of its L2 cache, `dram_gbps` what its memory's clock and width allow: 0 if unknown.
    """

    target: Target
    index: int
    name: str
    compute_capability: tuple[int, int]
    sms: int
    mma_flops_per_clock: int
    l2_bytes: int = 0
    dram_gbps: float = 0.0

    def __hash__(self) -> int:
        return hash((self.name, self.index))  # asked for with every choice of a kernel

    def dram_us(self, count: int) -> float:
        """The least microseconds in which a kernel reads `count` bytes; 0 for what the L2 cache holds.

        Inputs that are larger than the cache come from DRAM whole: what is read last displaces what was read
        first.
        """
        if count <= self.l2_bytes or not self.dram_gbps:
            return 0.0
        return count / (DRAM_SHARE * self.dram_gbps * 1e3)

    @property
    def smem_per_sm(self) -> int:
        """Bytes of shared memory for all CTAs of an SM (CUDA C++ Programming Guide, compute capabilities)."""
        if self.compute_capability == (8, 0):
            return 167936
        return 233472 if self.compute_capability[0] in (9, 10) else 102400


def mma_flops_per_clock(compute_capability: tuple[int, int], name: str) -> int:
    """What mma.sync does on one SM, with fp16 operands and fp32 accumulation."""
    if compute_capability == (8, 0):
        return 2048
    if compute_capability >= (9, 0) and "GeForce" not in name:
        return 2580  # mma.sync reaches 63 % of what wgmma does on an H200
    return 512 if "GeForce" in name else 1024


def imma_ops_per_clock(mma_flops_per_clock: int) -> int:
    """What mma.sync of bytes does on such an SM: twice as much. GeForce halves the 16-bit rate alone."""
    return 2 * max(mma_flops_per_clock, 1024)


def _ada(name: str, sms: int, l2_mib: int, dram_gbps: float) -> DeviceInfo:
    capability = (8, 9)
    return DeviceInfo(
        target=Target.CUDA,
        index=0,
        name=name,
        compute_capability=capability,
        sms=sms,
        mma_flops_per_clock=mma_flops_per_clock(capability, name),
        l2_bytes=l2_mib * 2**20,
        dram_gbps=dram_gbps,
    )


# Sources: "NVIDIA Ada GPU architecture", appendices A and B; NVIDIA L4 Tensor Core GPU datasheet.
L4 = _ada("NVIDIA L4", 58, 48, 300.0)
RTX_4090 = _ada("NVIDIA GeForce RTX 4090", 128, 72, 1008.0)
HOST = replace(L4, target=Target.HOST, name="host (modelled as NVIDIA L4)")


@functools.cache
def cuda_device(index: int) -> DeviceInfo:
    """Facts of CUDA device `index`. Raises DriverError."""
    _ask("cuInit", 0)
    handle = _ask("cuDeviceGet", index)
    name = _ask("cuDeviceGetName", 256, handle).partition(b"\0")[0].decode()
    attributes = _driver().CUdevice_attribute

    def attribute(which: str) -> int:
        return int(_ask("cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{which}"), handle))

    capability = (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR"))
    transfers = 2e3 * attribute("MEMORY_CLOCK_RATE")  # of a wire, in a second
    return DeviceInfo(
        target=Target.CUDA,
        index=index,
        name=name,
        compute_capability=capability,
        sms=attribute("MULTIPROCESSOR_COUNT"),
        mma_flops_per_clock=mma_flops_per_clock(capability, name),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        dram_gbps=transfers * attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8e9,
    )


@functools.cache
def _driver() -> Any:
    """cuda-python's driver functions, imported at first use: 0.1 s that calls on the CPU need not pay."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(f"GPUs need cuda-python 12.8 or newer: {error}") from error
    return driver


def _ask(function: str, *arguments: Any) -> Any:
    """Calls the driver and returns its result, or a list of several. Raises DriverError when it fails."""
    driver = _driver()
    try:
        status, *results = getattr(driver, function)(*arguments)
    except RuntimeError as error:
        raise DriverError(f"no NVIDIA driver was found (libcuda.so.1): {function}: {error}") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{function} failed with CUDA driver error {int(status)} ({status.name})")
    return results[0] if len(results) == 1 else results


def pointer_device(address: int) -> int:
    """The device whose memory `address` is in. Raises DriverError when CUDA does not know the address."""
    _ask("cuInit", 0)
    ordinal = _driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(_ask("cuPointerGetAttribute", ordinal, address))


def wait_for(stream: int, producer: int, device: int) -> None:
    """What is queued on `stream` of `device` from now on runs after what is on `producer` now."""
    _ask("cuCtxPushCurrent", _primary_context(device))
    try:
        event = _ask("cuEventCreate", int(_driver().CUevent_flags.CU_EVENT_DISABLE_TIMING))
        try:
            _ask("cuEventRecord", event, producer)
            _ask("cuStreamWaitEvent", stream, event, 0)
        finally:
            _ask("cuEventDestroy", event)  # once it has happened
    finally:
        _ask("cuCtxPopCurrent")


@functools.cache
def _primary_context(device: int) -> Any:
    """The context that the CUDA runtime uses on `device`, kept for good as the runtime keeps it."""
    _ask("cuInit", 0)
    return _ask("cuDevicePrimaryCtxRetain", device)


def driver_version() -> int | None:
    """The newest CUDA that the installed driver supports, as an integer (13000), or None without a driver."""
    try:
        return int(_ask("cuDriverGetVersion"))
    except DriverError:
        return None


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


def has_machine_code(archs: str, compute_capability: tuple[int, int]) -> bool:
    """True when what serves this compute capability needs no compiling by the driver at its first use."""
    entries = [arch.strip() for arch in archs.replace(",", ";").split(";")]
    real = ";".join(f"{entry.partition('-')[0]}-real" for entry in entries if not entry.endswith("-virtual"))
    return archs_serve(real, compute_capability)


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
