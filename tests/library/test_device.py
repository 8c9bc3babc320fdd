"""GPUs as the driver tells of them through cuda-python; what is said where it does not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sdpa_cutlass import DriverError
from sdpa_cutlass.library import device
from tests.library.fake_driver import CUresult, FakeDriver

ROOT = Path(__file__).parents[2]
FACTS = {
    "cuInit": lambda flags: (),
    "cuDeviceGet": lambda index: (f"device {index}",),
    "cuDeviceGetName": lambda length, handle: (b"NVIDIA L4".ljust(length, b"\0"),),
    "cuDeviceGetAttribute": lambda which, handle: (
        {"SMs": 58, "major": 8, "minor": 9, "L2": 48 * 2**20, "kHz": 6251000, "bits": 192}[which],
    ),
}


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeDriver], FakeDriver]:
    monkeypatch.setattr(device, "_primary_context", device._primary_context.__wrapped__)

    def put(driver: FakeDriver) -> FakeDriver:
        monkeypatch.setattr(device, "_driver", lambda: driver)
        return driver

    return put


def test_the_facts_of_a_gpu(use: Callable[[FakeDriver], FakeDriver]) -> None:
    use(FakeDriver(**FACTS))
    found = device.cuda_device.__wrapped__(1)
    assert (found.name, found.compute_capability, found.sms, found.index) == ("NVIDIA L4", (8, 9), 58, 1)
    assert found.mma_flops_per_clock == 1024
    assert found.l2_bytes == device.HOST.l2_bytes
    assert found.dram_gbps == pytest.approx(device.HOST.dram_gbps, rel=1e-3)


def test_an_error_has_its_number_and_name(use: Callable[[FakeDriver], FakeDriver]) -> None:
    use(FakeDriver(CUresult.CUDA_ERROR_NO_DEVICE, **FACTS))
    message = r"cuInit failed with CUDA driver error 100 \(CUDA_ERROR_NO_DEVICE\)"
    with pytest.raises(DriverError, match=message):
        device.cuda_device.__wrapped__(0)
    with pytest.raises(DriverError, match=message):
        device.pointer_device(4096)


def test_one_stream_waits_for_another(use: Callable[[FakeDriver], FakeDriver]) -> None:
    found = use(
        FakeDriver(
            cuInit=lambda flags: (),
            cuDevicePrimaryCtxRetain=lambda index: (f"context {index}",),
            cuCtxPushCurrent=lambda context: (),
            cuCtxPopCurrent=lambda: ("context",),
            cuEventCreate=lambda flags: ("event",),
            cuEventRecord=lambda event, stream: (),
            cuStreamWaitEvent=lambda stream, event, flags: (),
            cuEventDestroy=lambda event: (),
        )
    )
    device.wait_for(64, 32, 1)
    assert found.asked == [
        ("cuInit", 0),
        ("cuDevicePrimaryCtxRetain", 1),
        ("cuCtxPushCurrent", "context 1"),
        ("cuEventCreate", 2),
        ("cuEventRecord", "event", 32),
        ("cuStreamWaitEvent", 64, "event", 0),
        ("cuEventDestroy", "event"),
        ("cuCtxPopCurrent",),
    ]


def test_the_version_of_the_driver(use: Callable[[FakeDriver], FakeDriver]) -> None:
    functions = {"cuDriverGetVersion": lambda: (13000,)}
    use(FakeDriver(**functions))
    assert device.driver_version() == 13000
    use(FakeDriver(CUresult.CUDA_ERROR_NO_DEVICE, **functions))
    assert device.driver_version() is None


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, use: Callable[[FakeDriver], FakeDriver]) -> None:
    def absent(*arguments: object) -> tuple[object, ...]:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    use(FakeDriver(cuInit=absent, cuDriverGetVersion=absent))
    with pytest.raises(DriverError, match=r"no NVIDIA driver was found \(libcuda\.so\.1\).*Failed to dlopen"):
        device.cuda_device.__wrapped__(0)
    assert device.driver_version() is None


def test_without_cuda_python() -> None:
    """The package imports without it; what needs a GPU says what is missing."""
    code = (
        "import sys; sys.modules['cuda'] = sys.modules['cuda.bindings'] = None\n"
        "from sdpa_cutlass.library import device\n"
        "print(device.driver_version())\n"
        "try: device.cuda_device(0)\n"
        "except device.DriverError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("None\nGPUs need cuda-python 12.8 or newer: ")


def test_cuda_python_has_every_function_that_is_asked() -> None:
    """The fakes would answer under any name."""
    driver = pytest.importorskip("cuda.bindings.driver")
    text = Path(device.__file__).read_text(encoding="utf-8")
    functions = set(re.findall(r'_ask\("(\w+)"', text))
    assert len(functions) > 10
    assert {name for name in functions if not hasattr(driver, name)} == set()
    names = re.findall(r"_driver\(\)\.(CU\w+)\.(CU_\w+)", text)
    assert len(names) == 2
    assert all(hasattr(getattr(driver, kind), name) for kind, name in names)
    attributes = re.findall(r'\battribute\("(\w+)"\)', text)
    assert len(attributes) == 6
    assert all(hasattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{which}") for which in attributes)


@pytest.mark.gpu
def test_the_driver_of_this_machine() -> None:
    import torch

    torch.cuda.init()
    version = device.driver_version()
    assert version is not None
    assert version >= 12000
    for index in range(torch.cuda.device_count()):
        found, properties = device.cuda_device.__wrapped__(index), torch.cuda.get_device_properties(index)
        assert found.name == properties.name
        assert found.compute_capability == (properties.major, properties.minor)
        assert found.sms == properties.multi_processor_count
        place = torch.zeros(8, device=f"cuda:{index}")
        assert device.pointer_device(place.data_ptr()) == index
        with pytest.raises(DriverError, match="cuPointerGetAttribute failed with CUDA driver error 1 "):
            device.pointer_device(torch.zeros(8).data_ptr())
        producer, stream = (torch.cuda.Stream(index) for _ in range(2))
        torch.cuda.synchronize(index)
        with torch.cuda.stream(producer):
            torch.cuda._sleep(200_000_000)
            place.fill_(3)
        device.wait_for(stream.cuda_stream, producer.cuda_stream, index)
        with torch.cuda.stream(stream):
            copied = place.clone()
        stream.synchronize()
        assert copied.eq(3).all()
