"""The facts that a result file records about its machine and software. No host name, user name or path.

Everything here answers with None rather than fail: a result without a clock reading is still a result.
"""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import TYPE_CHECKING, Any

import sdpa_cutlass
from sdpa_cutlass.errors import SdpaError
from sdpa_cutlass.library import launcher
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target

if TYPE_CHECKING:
    import torch

_SMI_FIELDS = {
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "mem_mhz": "clocks.mem",
    "sm_max_mhz": "clocks.max.sm",
    "power_limit_w": "power.limit",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def output_of(command: list[str], *, timeout: float = 10.0) -> str | None:
    """What a program prints, or None when it is not there, fails or takes too long."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=timeout, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def gpu_state(uuid: str | None = None) -> dict[str, str]:
    """Driver, clocks, power and temperature of one GPU as nvidia-smi prints them; may be empty."""
    fields = ",".join(_SMI_FIELDS.values())
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    if uuid is not None:
        command.append(f"--id={uuid}")
    text = output_of(command)
    if not text:
        return {}
    values = [value.strip() for value in text.splitlines()[0].split(",")]
    return dict(zip(_SMI_FIELDS, values, strict=False))


def gpu_uuid(device: torch.device) -> str | None:
    """The name by which nvidia-smi knows the GPU that torch calls `device`."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else None


def cpu_name() -> str | None:
    """The processor's model name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        return platform.processor() or None
    return names[0] if names else platform.machine()


def library_record(target: Target) -> dict[str, Any] | None:
    """What the library for `target` was built from, or None when it cannot be used."""
    try:
        build = library(target).build
    except SdpaError:
        return None
    return {
        "target": target.value,
        "version": build.version,
        "digest": build.digest,
        "space": build.space,
        "archs": build.archs,
        "cuda_runtime": build.cuda_runtime_version,
        "cutlass": build.cutlass_version,
        "sanitizers": build.sanitizers,
    }


def record(device: torch.device) -> dict[str, Any]:
    """The `env` of a result file, as known before measuring; close() adds what is known after."""
    import torch

    env: dict[str, Any] = {
        "gpu": None,
        "sm": None,
        "driver": None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "library": library_record(Target.CUDA if device.type == "cuda" else Target.HOST),
        "compiled_launcher": launcher.is_used(),
        "date": _now(),
        "clocks": None,
        "package": sdpa_cutlass.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        uuid = gpu_uuid(device)
        state = gpu_state(uuid)
        env |= {
            "gpu": properties.name,
            "gpu_uuid": uuid,
            "sm": f"{properties.major}.{properties.minor}",
            "driver": state.pop("driver", None),
            "clocks": {"start": state},
            "sm_count": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "memory_bytes": properties.total_memory,
            "cudnn": torch.backends.cudnn.version(),
        }
    return env


def close(env: dict[str, Any], device: torch.device) -> None:
    """Adds the date and the clocks at the end of the measurements to `env`."""
    env["date_end"] = _now()
    if device.type == "cuda":
        state = gpu_state(gpu_uuid(device))
        state.pop("driver", None)
        env["clocks"]["end"] = state


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
