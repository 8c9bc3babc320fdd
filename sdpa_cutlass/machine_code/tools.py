"""The two programs that read machine code, and what is asked of them.

cuobjdump takes a library apart into cubins, one per unit and architecture, and tells what a kernel occupies;
nvdisasm disassembles. Both are packages (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm) and part of every CUDA
toolkit. A newer release reads what an older compiler wrote, but not the other way round: the packages of
this Python come first, then PATH, then /usr/local/cuda.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from sdpa_cutlass.errors import SdpaError

_TOOLKIT = Path("/usr/local/cuda/bin")
_USAGE = re.compile(
    r"^ Function (?P<name>\S+):\s*\n\s*REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) ",
    re.MULTILINE,
)
_COMPILER = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")


class MachineCodeError(SdpaError, RuntimeError):
    """The machine code of a library cannot be read; the message says what is missing or what failed."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel occupies: registers of a thread, bytes of stack of a thread, static shared memory."""

    registers: int
    stack_bytes: int
    smem_bytes: int


@functools.cache
def find(name: str) -> str:
    """The path of `name`. Raises MachineCodeError, saying where it was looked for and how to get it."""
    package = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", name)
    for place in (str(package), shutil.which(name), str(_TOOLKIT / name)):
        if place is not None and Path(place).is_file():
            return place
    raise MachineCodeError(
        f"{name} was not found: neither {package} nor {_TOOLKIT / name} is there, and it is not on PATH. "
        f"Install it with `pip install nvidia-cuda-{name}`, or put a CUDA toolkit's bin folder on PATH."
    )


def extract(library: Path, folder: Path) -> list[Path]:
    """Writes the cubins of `library` into the empty `folder`; returns them in the library's order."""
    _run("cuobjdump", "-xelf", "all", str(library.resolve()), cwd=folder)
    cubins = sorted(folder.glob("*.cubin"), key=lambda path: int(path.name.split(".")[-3]))
    if not cubins:
        raise MachineCodeError(f"{library}: no machine code in it, only PTX")
    return cubins


def arch_of(cubin: Path) -> int:
    """The architecture in the name of an extracted cubin: `library.3.sm_89.cubin` → 89."""
    return int(re.sub(r"\D", "", cubin.name.split(".")[-2]))


def usage(cubin: Path) -> dict[str, Usage]:
    """What every kernel of `cubin` occupies."""
    return parse_usage(_run("cuobjdump", "-res-usage", str(cubin)))


def parse_usage(text: str) -> dict[str, Usage]:
    """Reads what `cuobjdump -res-usage` prints."""
    return {
        match["name"]: Usage(int(match["registers"]), int(match["stack"]), int(match["shared"]))
        for match in _USAGE.finditer(text)
    }


def disassemble(cubin: Path) -> str:
    """The text of nvdisasm: every function of `cubin`, with labels as branch targets."""
    return _run("nvdisasm", "--print-code", str(cubin))


def compiler(cubin: bytes) -> str:
    """The release of ptxas that wrote `cubin`, such as "13.0.88", or "unknown"."""
    match = _COMPILER.search(cubin)
    return match[1].decode() if match else "unknown"


def _run(tool: str, *arguments: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run([find(tool), *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    except OSError as error:
        raise MachineCodeError(f"{find(tool)} cannot be run: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise MachineCodeError(
            f"`{tool} {' '.join(arguments)}` failed: {said[-1] if said else done.returncode}"
        )
    return done.stdout
