"""What the compiled kernels occupy and what their loops cost, as plain data for JSON and for view.py.

Occupancy is computed for sm_86, sm_89 and sm_90 with the registers of the sm_89 code. That is exact for
sm_89 (and for sm_86 unless it is built for on its own); sm_90 runs code that its driver compiles from PTX,
often with other registers. Costs of a loop are those of machine_code/mix.py on three cards that differ in
their tensor cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import mma_flops_per_clock
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import KernelInfo, read_kernels
from sdpa_cutlass.machine_code import gates, kernels
from sdpa_cutlass.machine_code.kernels import KernelCode, LoopCode
from sdpa_cutlass.machine_code.occupancy import SMS, occupancy

FUSED = "fmha_fwd_*"
ARCHS = (86, 89, 90)
CARDS = {
    "L4": mma_flops_per_clock((8, 9), "NVIDIA L4"),
    "RTX 4090": mma_flops_per_clock((8, 9), "NVIDIA GeForce RTX 4090"),
    "H200": mma_flops_per_clock((9, 0), "NVIDIA H200"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Library:
    """The CUDA library: its fused rows by symbol, and the machine code of the kernels that were asked for."""

    path: Path
    space: str
    infos: dict[str, KernelInfo]
    code: list[KernelCode]

    @property
    def problems(self) -> list[str]:
        """Everything that must hold of these kernels' code and does not."""
        return [line for code in self.code for line in gates.problems(code, self.infos.get(code.name))]


def read(names: str) -> Library:
    """The CUDA library, with the kernels whose name or symbol matches the glob `names`.

    Raises SdpaError when there is no library, or no program to read it with.
    """
    native = library(Target.CUDA)
    code = kernels.read(native.path, names, arch=gates.ARCH)
    return Library(native.path, native.build.space, gates.fused_rows(read_kernels(native)), code)


def facts(code: KernelCode, info: KernelInfo | None) -> dict[str, Any]:
    """One kernel; `info` is None for the kernels of the unfused family, whose threads a row does not tell."""
    found: dict[str, Any] = {
        "name": code.name,
        "arch": code.arch,
        "compiler": code.compiler,
        "registers": code.registers,
        "stack_bytes": code.stack_bytes,
        "local_instructions": code.local_instructions,
        "static_smem_bytes": code.static_smem_bytes,
        "dynamic_smem_bytes": info.smem_bytes if info else None,
        "threads": info.threads if info else None,
        "code_bytes": code.code_bytes,
        "instructions": code.mix.groups,
        "global_loads": code.mix.widths("LDG"),
        "global_stores": code.mix.widths("STG"),
        "occupancy": _occupancies(code, info) if info else None,
        "loops": [_loop(loop, code) for loop in code.loops],
        "problems": gates.problems(code, info),
    }
    return found


def _occupancies(code: KernelCode, info: KernelInfo) -> dict[str, dict[str, Any]]:
    smem = code.static_smem_bytes + info.smem_bytes
    return {
        f"sm_{arch}": dataclasses.asdict(
            occupancy(SMS[arch], threads=info.threads, registers=code.registers, smem_bytes=smem)
        )
        for arch in ARCHS
    }


def _loop(loop: LoopCode, code: KernelCode) -> dict[str, Any]:
    mmas = loop.mmas
    return {
        "address": loop.address,
        "is_main": loop is code.main_loop,
        "slots": loop.mix.instructions,
        "always": loop.always,
        "mmas": mmas,
        "slots_per_mma": loop.mix.instructions / mmas if mmas else None,
        "groups": {group: count for group, count in loop.mix.groups.items() if count},
        "opcodes": dict(loop.mix.opcodes),
        "cycles": {card: loop.mix.cycles(rate) for card, rate in CARDS.items()} if mmas else None,
    }


def main_loop(kernel: dict[str, Any]) -> dict[str, Any] | None:
    """The main loop among a kernel's facts."""
    return next((loop for loop in kernel["loops"] if loop["is_main"]), None)


def busiest(cycles: dict[str, float]) -> str:
    """The unit that takes longest."""
    return max(cycles, key=cycles.__getitem__)


def document(found: Library) -> dict[str, Any]:
    """Everything, for a file; the library by its file name only."""
    return {
        "library": found.path.name,
        "space": found.space,
        "kernels": all_facts(found),
    }


def all_facts(found: Library) -> list[dict[str, Any]]:
    """The facts of every kernel that was read."""
    return [facts(code, found.infos.get(code.name)) for code in found.code]


def gate_table(found: Library) -> str:
    """The committed table of a whole library, as Markdown."""
    return gates.render(found.code, found.infos)


def columns_of(loops: Sequence[dict[str, Any]]) -> list[str]:
    """The groups of instructions that occur in any of the loops, in their usual order."""
    order: dict[str, None] = {}
    for loop in sorted(loops, key=lambda loop: -len(loop["groups"])):
        order.update(dict.fromkeys(loop["groups"]))
    return list(order)
