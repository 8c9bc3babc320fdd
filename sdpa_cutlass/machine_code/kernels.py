"""Registers, memory and loops of every kernel of a CUDA library; disassembled once and kept.

Disassembling a release library takes about 20 s on one core. What is read from a cubin is therefore kept in
`$XDG_CACHE_HOME/sdpa_cutlass/machine_code` (default ~/.cache), as JSON named after the SHA-256 of the cubin:
a unit that the compiler made again gets a new name, the others are not read twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpa_cutlass.machine_code import loops, sass, tools
from sdpa_cutlass.machine_code.mix import Mix

_FORMAT = 4  # of a cache file; raise it when anything in this package reads code in another way

_HEX = re.compile(r"0x[0-9a-f]+")
_REGISTER = re.compile(r"\bR(\d+)\b")


@dataclass(frozen=True, slots=True)
class LoopCode:
    """One loop: the address of its first instruction, and what is in it, inner loops included.

    `always` is how many of the instructions every pass executes; the others lie behind branches. `whole` are
    those of a whole pass (loops.Loop).
    """

    address: int
    always: int
    mix: Mix
    whole: Mix

    @property
    def mmas(self) -> int:
        """Its tensor core instructions."""
        return self.mix.count(r"[HI]MMA\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCode:
    """The machine code of one kernel for one architecture. `mix` counts the whole function."""

    name: str
    arch: int
    compiler: str
    registers: int
    stack_bytes: int
    static_smem_bytes: int
    code_bytes: int
    mix: Mix
    loops: tuple[LoopCode, ...]
    setmaxnreg: tuple[int, ...] = ()
    """Where warps deal registers out again: what those that load keep, what the others get, and the highest
    register in the code of those that load."""

    @property
    def mma_loops(self) -> list[LoopCode]:
        """The loops that multiply matrices, without those around one that does."""
        return [loop for loop in self.loops if loop.mmas]

    @property
    def main_loop(self) -> LoopCode | None:
        """The shortest loop that multiplies: whole blocks of keys, no mask. None where no loop multiplies."""
        return min(self.mma_loops, key=lambda loop: loop.mix.instructions, default=None)

    @property
    def local_instructions(self) -> int:
        """Loads and stores of local memory: spills, and arrays that did not fit into registers."""
        return self.mix.groups["LDL"] + self.mix.groups["STL"]


def read(library: Path, names: str = "*", arch: int | None = None) -> list[KernelCode]:
    """The kernels of `library` whose symbol matches the glob `names`, sorted by symbol.

    `arch`: machine code of this architecture, such as 89; default: the newest of each kernel. A symbol that
    several units define is there once. Raises tools.MachineCodeError.
    """
    found: dict[str, KernelCode] = {}
    with tempfile.TemporaryDirectory(prefix="sdpa_cutlass.") as folder:
        cubins = [
            cubin
            for cubin in tools.extract(library, Path(folder))
            if arch is None or tools.arch_of(cubin) == arch
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for kernels in pool.map(lambda cubin: _of_cubin(cubin, names), cubins):
                for kernel in kernels:
                    if kernel.name not in found or kernel.arch > found[kernel.name].arch:
                        found[kernel.name] = kernel
    return [found[name] for name in sorted(found)]


def _of_cubin(cubin: Path, names: str) -> list[KernelCode]:
    usage = tools.usage(cubin)
    wanted = fnmatch.filter(usage, names)
    if not wanted:
        return []
    content = cubin.read_bytes()
    place = _cache_folder() / f"{hashlib.sha256(content).hexdigest()}.json"
    kernels = _load(place)
    if kernels is None:
        functions = sass.parse(tools.disassemble(cubin))
        arch, compiler = tools.arch_of(cubin), tools.compiler(content)
        kernels = [
            analyse(name, functions[name], usage=usage[name], arch=arch, compiler=compiler) for name in usage
        ]
        _save(place, kernels)
    return [kernel for kernel in kernels if kernel.name in wanted]


def analyse(
    name: str, code: list[sass.Instruction], *, usage: tools.Usage, arch: int, compiler: str
) -> KernelCode:
    """What is kept of a function: of its loops those that multiply matrices, and those outside of these."""
    return KernelCode(
        name=name,
        arch=arch,
        compiler=compiler,
        registers=usage.registers,
        stack_bytes=usage.stack_bytes,
        static_smem_bytes=usage.smem_bytes,
        code_bytes=sass.INSTRUCTION_BYTES * len(code),
        mix=Mix.of(code),
        loops=tuple(
            LoopCode(
                address=sass.INSTRUCTION_BYTES * loop.header,
                always=loop.always,
                mix=Mix.of(code[i] for i in loop.instructions),
                whole=Mix.of(code[i] for i in loop.whole),
            )
            for loop in _of_interest(code, loops.find_loops(code))
        ),
        setmaxnreg=_setmaxnreg(code),
    )


def _setmaxnreg(code: list[sass.Instruction]) -> tuple[int, ...]:
    """See KernelCode. The code of the warps that load lies between their USETMAXREG and the last UTMALDG."""
    given = {
        kind: int(number.group(), 16)
        for kind in ("DEALLOC", "TRY_ALLOC")
        for i in code
        if i.opcode.startswith(f"USETMAXREG.{kind}") and (number := _HEX.search(i.operands))
    }
    loads = [at for at, i in enumerate(code) if i.base == "UTMALDG"]
    first = next((at for at, i in enumerate(code) if i.opcode.startswith("USETMAXREG.DEALLOC")), None)
    if len(given) != 2 or first is None or not loads:
        return ()
    used = [int(number) for i in code[first : loads[-1] + 1] for number in _REGISTER.findall(i.operands)]
    return given["DEALLOC"], given["TRY_ALLOC"], max(used, default=0)


def _of_interest(code: list[sass.Instruction], found: list[loops.Loop]) -> Iterable[loops.Loop]:
    multiplying = [loop for loop in found if any(code[i].base in loops.PRODUCTS for i in loop.instructions)]
    members = {loop.header: set(loop.instructions) for loop in found}

    def inside(loop: loops.Loop, outer: loops.Loop) -> bool:
        return loop is not outer and members[loop.header] < members[outer.header]

    innermost = [loop for loop in multiplying if not any(inside(other, loop) for other in multiplying)]
    for loop in found:
        outside = loop not in multiplying and not any(inside(loop, outer) for outer in innermost)
        if loop in innermost or outside:
            yield loop


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else Path.home() / ".cache", "sdpa_cutlass", "machine_code")


def _load(place: Path) -> list[KernelCode] | None:
    """The kernels of a cache file; None when it is not there or not of this format: then it is made again."""
    try:
        document = json.loads(place.read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            return None
        return [_from_json(kernel) for kernel in document["kernels"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _from_json(kernel: dict[str, Any]) -> KernelCode:
    found = [
        LoopCode(
            address=loop["address"],
            always=loop["always"],
            mix=Mix(loop["mix"]["opcodes"]),
            whole=Mix(loop["whole"]["opcodes"]),
        )
        for loop in kernel["loops"]
    ]
    made = {
        "mix": Mix(kernel["mix"]["opcodes"]),
        "loops": tuple(found),
        "setmaxnreg": tuple(kernel["setmaxnreg"]),
    }
    return KernelCode(**{**kernel, **made})


def _save(place: Path, kernels: list[KernelCode]) -> None:
    """Writes a cache file, whole or not at all. A folder that cannot be written costs time, nothing else."""
    document = {"format": _FORMAT, "kernels": [dataclasses.asdict(kernel) for kernel in kernels]}
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(document, file)
            os.replace(temporary, place)
        except BaseException:
            os.unlink(temporary)
            raise
