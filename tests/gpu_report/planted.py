"""Kernels with one defect each, compiled at run time: each tool has to find its own, or it proves nothing.

`good` has none.

python -m tests.gpu_report.planted memcheck|racecheck|synccheck|initcheck|good
"""

from __future__ import annotations

import sys
from typing import Any

import numpy

from tests.gpu_report.memory import DeviceMemory, checked

SOURCES = {
    "memcheck": "data[threadIdx.x + 1] = 1;",  # one thread writes behind the last element
    "racecheck": "room[threadIdx.x] = threadIdx.x; data[threadIdx.x] = room[threadIdx.x ^ 32];",  # no barrier
    "synccheck": "if (threadIdx.x < 5) { __syncthreads(); } data[threadIdx.x] = 1;",
    "initcheck": "data[threadIdx.x] = data[threadIdx.x] + 1;",  # nobody has written it before
    "good": "room[threadIdx.x] = threadIdx.x; __syncthreads(); data[threadIdx.x] = room[threadIdx.x ^ 32];",
}
_THREADS = 64


def source_of(name: str) -> str:
    """CUDA C++ of one kernel."""
    head = (
        f'extern "C" __global__ void planted(volatile int *data) {{ __shared__ volatile int room[{_THREADS}];'
    )
    return f"{head} {SOURCES[name]} }}"


def compiled(source: str) -> Any:
    """The function `planted` of CUDA C++ `source`, for the current context's GPU."""
    from cuda.bindings import driver, nvrtc

    kind = driver.CUdevice_attribute
    device = checked(driver.cuCtxGetDevice())
    major, minor = (
        checked(driver.cuDeviceGetAttribute(attribute, device))
        for attribute in (
            kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"planted.cu", 0, [], []))
    options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    module = checked(driver.cuModuleLoadData(numpy.frombuffer(cubin, numpy.uint8).ctypes.data))
    return checked(driver.cuModuleGetFunction(module, b"planted"))


def launch(function: Any, address: int, threads: int = _THREADS) -> None:
    """Queues planted(address) on the default stream."""
    from cuda.bindings import driver

    values = numpy.array([address], numpy.uint64)
    pointers = numpy.array([values.ctypes.data], numpy.uint64)
    checked(driver.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, 0, pointers.ctypes.data, 0))


def main(name: str) -> int:
    memory = DeviceMemory()
    address = memory.allocate(4 * _THREADS)
    if name != "initcheck":
        memory.write(address, numpy.zeros(4 * _THREADS, numpy.uint8))
    launch(compiled(source_of(name)), address)
    memory.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
