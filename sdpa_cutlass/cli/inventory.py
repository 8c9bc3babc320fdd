"""What was built and what is found on this machine, as plain data; and what is wrong with it, with a fix.

Nothing here raises because something is missing: that is what it is there to tell. take() gathers, problems()
judges what was gathered, so that every judgement can be tested without the machine that it is about.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import sdpa_cutlass
from sdpa_cutlass.choice.select import FORCE_VARIABLE
from sdpa_cutlass.cli.environment import gpu_state, output_of, package_version
from sdpa_cutlass.errors import SdpaError
from sdpa_cutlass.library import launcher, locate
from sdpa_cutlass.library.abi import library, load
from sdpa_cutlass.library.device import archs_serve, driver_version, has_machine_code
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import read_kernels

NVCC_FIX = "pip install 'cuda-toolkit[nvcc,cccl]==13.0.*' nvidia-cutlass==4.2.0.0"
NO_LAUNCHER = "not built: it needs Python's headers, and a CPython that is not free-threaded"
CUDA_PYTHON = "cuda-python>=12.8"
MACHINE_CODE = "machine code"
PTX = "PTX, which the driver compiles at first use and caches (`python -m sdpa_cutlass warm` does it ahead)"
NO_CODE = "nothing that runs here"
CLI_PACKAGES = ("rich", "matplotlib", "safetensors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LibraryFacts:
    """One of the two libraries. `error` says why it cannot be used; the rest is then None or empty."""

    target: str
    path: str | None = None
    error: str | None = None
    missing: bool = False
    version: str | None = None
    digest: str | None = None
    space: str | None = None
    archs: str | None = None
    cuda_runtime: int | None = None
    cutlass: int | None = None
    sanitizers: str | None = None
    kernels: dict[str, dict[int, int]] = dataclasses.field(
        default_factory=dict
    )  # family -> head_dim -> count
    kinds: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # family -> "exact, code for 89"
    codes: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # family -> compiled for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    compute_capability: tuple[int, int]
    sms: int
    memory_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inventory:
    """Everything that `info` prints. Versions are text as their owners print them; None: not found."""

    package: str
    python: str
    platform: str
    libraries: tuple[LibraryFacts, ...]
    launcher: str
    launcher_is_refused: bool = False
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    driver_cuda: int | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    torch_error: str | None = None
    cuda_python: str | None = None
    nvcc: str | None = None
    cutlass_wheel: str | None = None
    compiler: str | None = None
    cli_packages: dict[str, str | None] = dataclasses.field(default_factory=dict)
    forced_kernel: str | None = None


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Something that is wrong, and one line that puts it right."""

    what: str
    fix: str


def take() -> Inventory:
    """Looks at this machine."""
    torch_facts = _torch_facts()
    launcher_file, launcher_is_refused = launcher_facts()
    return Inventory(
        package=sdpa_cutlass.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        libraries=tuple(library_facts(target) for target in Target),
        launcher=launcher_file,
        launcher_is_refused=launcher_is_refused,
        driver=gpu_state().get("driver"),
        driver_cuda=driver_version(),
        cuda_python=package_version("cuda-python") or package_version("cuda-bindings"),
        nvcc=_nvcc(),
        cutlass_wheel=package_version("nvidia-cutlass"),
        compiler=_first_line(output_of([os.environ.get("CXX", "g++"), "--version"])),
        cli_packages={name: package_version(name) for name in CLI_PACKAGES},
        forced_kernel=os.environ.get(FORCE_VARIABLE),
        **torch_facts,
    )


def launcher_facts() -> tuple[str, bool]:
    """The compiled launcher's file, or why there is none; True when it is refused, and with it every call."""
    try:
        path, module = locate.locate_launcher(), launcher.module()
    except SdpaError as error:
        return _first_line(str(error)) or "", True
    if path is None:
        off = os.environ.get(locate.LAUNCHER_VARIABLE)
        return (f"{locate.LAUNCHER_VARIABLE}={off}" if off else NO_LAUNCHER), False
    if module is None:
        return f"not used: {path} is not for this Python and package", False
    has_exchange = launcher.exchange() is not None
    return (str(path) if has_exchange else "not used: torch has no DLPack exchange API"), False


def library_facts(target: Target) -> LibraryFacts:
    """What is known about the library for `target`."""
    try:
        path = locate.locate(target)
    except sdpa_cutlass.LibraryNotFoundError as error:
        return LibraryFacts(target=target.value, error=str(error), missing=True)
    except (SdpaError, OSError) as error:
        return LibraryFacts(target=target.value, error=str(error))
    try:
        loaded = load(path, target)  # alone: library() asks for the launcher as well
        counts: dict[str, Counter[int]] = {}
        kinds: dict[str, set[str]] = {}
        codes: dict[str, set[str]] = {}
        for kernel in read_kernels(loaded):
            kinds.setdefault(kernel.family.value, set()).add(f"{kernel.accuracy}, code for {kernel.code}")
            codes.setdefault(kernel.family.value, set()).add(
                kernel.code if kernel.is_for_one_arch else loaded.build.archs
            )
            counts.setdefault(kernel.family.value, Counter())[kernel.head_dim] += 1
    except SdpaError as error:
        return LibraryFacts(target=target.value, path=str(path), error=str(error))
    build = loaded.build
    return LibraryFacts(
        target=target.value,
        path=str(loaded.path),
        version=build.version,
        digest=build.digest,
        space=build.space,
        archs=build.archs,
        cuda_runtime=build.cuda_runtime_version,
        cutlass=build.cutlass_version,
        sanitizers=build.sanitizers,
        kernels={family: dict(sorted(count.items())) for family, count in sorted(counts.items())},
        kinds={family: sorted(found) for family, found in sorted(kinds.items())},
        codes={family: sorted(found) for family, found in sorted(codes.items())},
    )


def how_served(facts: LibraryFacts, gpu: Gpu) -> dict[str, list[str]]:
    """MACHINE_CODE, PTX or NO_CODE → the families whose kernels run so on `gpu`. Without the empty ones."""
    found: dict[str, list[str]] = {MACHINE_CODE: [], PTX: [], NO_CODE: []}
    for family, codes in facts.codes.items():
        kinds = {
            MACHINE_CODE
            if has_machine_code(code, gpu.compute_capability)
            else PTX
            if archs_serve(code, gpu.compute_capability)
            else NO_CODE
            for code in codes
        }
        for kind in kinds:
            found[kind].append(family)
    return {kind: families for kind, families in found.items() if families}


def problems(found: Inventory) -> list[Trouble]:
    """What is wrong, the gravest first."""
    troubles = []
    usable = {facts.target: facts for facts in found.libraries if facts.error is None}
    for facts in found.libraries:
        needed = facts.target == Target.HOST.value or found.driver_cuda is not None or not usable
        if facts.error is not None and not facts.missing:
            troubles.append(Trouble(_first_line(facts.error) or "", Target(facts.target).how_to_build))
        elif facts.missing and needed:
            what = f"the {facts.target} library is not built"
            troubles.append(Trouble(what, Target(facts.target).how_to_build))
    if found.launcher_is_refused:
        troubles.append(Trouble(found.launcher, f"set {locate.LAUNCHER_VARIABLE}=off to do without it"))
    if found.torch is None:
        what = found.torch_error or "torch is not installed"
        troubles.append(Trouble(what, "pip install 'sdpa_cutlass[torch]'"))
    missing = [name for name, version in found.cli_packages.items() if version is None]
    if missing:
        what = f"the commands need {', '.join(missing)}"
        troubles.append(Trouble(what, "pip install 'sdpa_cutlass[cli]'"))
    troubles += _gpu_problems(found, usable.get(Target.CUDA.value))
    if Target.CUDA.value not in usable and found.nvcc is None:
        troubles.append(Trouble("no nvcc to build the cuda library with", NVCC_FIX))
    if found.compiler is None and len(usable) < len(found.libraries):
        troubles.append(Trouble("no C++ compiler to build with", "apt-get install g++"))
    if found.forced_kernel:
        what = f"{FORCE_VARIABLE}={found.forced_kernel!r} narrows every choice of a kernel"
        troubles.append(Trouble(what, f"unset {FORCE_VARIABLE}"))
    return troubles


def works(found: Inventory) -> dict[str, str]:
    """What can be done on this machine: "yes", and with what, or "no", and why."""
    usable = {facts.target: facts for facts in found.libraries if facts.error is None}
    cuda, host = usable.get(Target.CUDA.value), usable.get(Target.HOST.value)
    no_launcher = found.launcher if found.launcher_is_refused else None
    on_gpu = no_launcher or (None if cuda else "the cuda library cannot be used")
    on_gpu = on_gpu or next((trouble.what for trouble in _gpu_problems(found, cuda)), None)
    if on_gpu is None and not found.gpus:
        on_gpu = "no GPU"
    on_cpu = no_launcher or (None if host else "the host library cannot be used")
    missing = [name for name, version in found.cli_packages.items() if version is None]
    needed = [*([] if found.torch else ["torch"]), *missing]
    return {
        "on a GPU": f"no: {on_gpu}" if on_gpu else f"yes: {found.gpus[0].name}, {_count(cuda)} kernels",
        "on the CPU": f"no: {on_cpu}" if on_cpu else f"yes: {_count(host)} kernels, for correctness",
        "from torch": f"yes: torch {found.torch}" if found.torch else "no: arrays of other libraries alone",
        "commands": f"no: they need {', '.join(needed)}" if needed else "yes",
    }


def _count(facts: LibraryFacts | None) -> int:
    return sum(sum(counts.values()) for counts in facts.kernels.values()) if facts else 0


def _gpu_problems(found: Inventory, cuda: LibraryFacts | None) -> list[Trouble]:
    troubles: list[Trouble] = []
    if found.driver_cuda is None:
        if found.gpus:
            what = "torch has a GPU that cuda-python finds no driver for"
            troubles.append(Trouble(what, f"pip install --upgrade '{CUDA_PYTHON}'"))
        return troubles
    if found.torch is not None and found.torch_cuda is None:
        what = f"there is an NVIDIA driver, but torch {found.torch} was built without CUDA"
        troubles.append(Trouble(what, "install a CUDA build of torch, as pytorch.org tells for your system"))
    elif found.torch is not None and not found.gpus:
        troubles.append(Trouble("torch finds no GPU", "check `nvidia-smi` and CUDA_VISIBLE_DEVICES"))
    if cuda is None:
        return troubles
    runtime = cuda.cuda_runtime or 0
    if found.driver_cuda // 1000 < runtime // 1000:
        supported = cuda_version(found.driver_cuda)
        what = f"the driver supports CUDA {supported}, the library needs {cuda_version(runtime)}"
        troubles.append(Trouble(what, "update the NVIDIA driver (CUDA 13 needs 580 or later)"))
    for gpu in found.gpus:
        if not archs_serve(cuda.archs or "", gpu.compute_capability):
            major, minor = gpu.compute_capability
            what = f"the library was built for {cuda.archs}, but {gpu.name} is sm_{major}{minor}"
            fix = f"build it with -DSDPA_CUDA_ARCHS={major}{minor}"
            troubles.append(Trouble(what, fix))
    return troubles


def cuda_version(version: int) -> str:
    """CUDA's integer as text: 13000 → 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
    except ModuleNotFoundError:
        return {}
    except Exception as error:  # a broken installation fails in many ways
        return {"torch_error": f"torch cannot be imported: {_first_line(str(error))}"}
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append(
                Gpu(
                    name=properties.name,
                    compute_capability=(properties.major, properties.minor),
                    sms=properties.multi_processor_count,
                    memory_bytes=properties.total_memory,
                )
            )
    return {"torch": str(torch.__version__), "torch_cuda": torch.version.cuda, "gpus": tuple(gpus)}


def _nvcc() -> str | None:
    """The release of the nvcc that a build would find: on PATH, or in the wheel of this Python."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "nvcc"
    for program in (os.environ.get("CUDACXX"), shutil.which("nvcc"), str(wheel)):
        text = output_of([program, "--version"]) if program else None
        release = re.search(r"release ([\d.]+)", text or "")
        if release:
            origin = "wheel" if program == str(wheel) else "system"
            return f"{release.group(1)} ({origin})"
    return None


def _first_line(text: str | None) -> str | None:
    return text.strip().splitlines()[0] if text and text.strip() else None


def occupancies(target: Target) -> list[dict[str, Any]]:
    """What every kernel of a library occupies; registers and CTAs per SM only where a GPU tells."""
    try:
        loaded = library(target)
        rows = read_kernels(loaded)
    except SdpaError:
        return []
    on_gpu = target is Target.CUDA and "torch" in sys.modules and sys.modules["torch"].cuda.is_available()
    listed = []
    for row in rows:
        facts: dict[str, Any] = {
            "name": row.name,
            "smem_bytes": row.smem_bytes,
            "ctas_per_sm": row.ctas_per_sm,
            "registers": None,
            "local_bytes": None,
            "ctas_per_sm_here": None,
        }
        if on_gpu:
            try:
                occupancy = loaded.occupancy(row.index, 0)
            except SdpaError:
                pass  # rows that launch several kernels have no occupancy
            else:
                facts["registers"] = occupancy.registers
                facts["local_bytes"] = occupancy.local_bytes
                facts["ctas_per_sm_here"] = occupancy.ctas_per_sm
        listed.append(facts)
    return listed
