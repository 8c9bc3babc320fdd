"""The `info` command: prints what inventory.py finds, as text or JSON.

It reports; it does not judge: the exit status is 0 whatever is missing. It needs neither torch nor rich.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from sdpa_cutlass.cli import OK, inventory
from sdpa_cutlass.cli.inventory import Gpu, Inventory, LibraryFacts, Trouble, cuda_version
from sdpa_cutlass.library.locate import Target

KERNEL_COLUMNS = {
    "name": "kernel",
    "smem_bytes": "smem bytes",
    "ctas_per_sm": "CTAs/SM on sm_89",
    "registers": "registers",
    "local_bytes": "spilled bytes",
    "ctas_per_sm_here": "CTAs/SM here",
}


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    found = inventory.take()
    troubles = inventory.problems(found)
    kernels = {target.value: inventory.occupancies(target) for target in Target} if options.kernels else {}
    if options.json:
        document: dict[str, Any] = dataclasses.asdict(found)
        document["problems"] = [dataclasses.asdict(trouble) for trouble in troubles]
        if options.kernels:
            document["kernels"] = kernels
        print(json.dumps(document, indent=1))
        return OK
    print(render(found, troubles))
    for target, rows in kernels.items():
        if rows:
            print(f"\nKernels of the {target} library")
            print(render_kernels(rows))
    return OK


def render(found: Inventory, troubles: list[Trouble]) -> str:
    """The report as text."""
    lines = [f"sdpa_cutlass {found.package}, Python {found.python}, {found.platform}"]
    lines += ["", "What works here", *(_line(*pair) for pair in inventory.works(found).items())]
    for facts in found.libraries:
        lines += ["", *_library_lines(facts)]
    lines += ["", "The compiled launcher (optional, for shorter calls)", _line("file", found.launcher)]
    lines += ["", "This machine"]
    if found.gpus:
        for index, gpu in enumerate(found.gpus):
            major, minor = gpu.compute_capability
            memory = gpu.memory_bytes / 2**30
            lines.append(
                _line(f"GPU {index}", f"{gpu.name}, sm_{major}{minor}, {gpu.sms} SMs, {memory:.0f} GiB")
            )
            lines += _code_lines(found, gpu)
    else:
        lines.append(_line("GPU", "none that torch can use"))
    driver = None
    if found.driver_cuda:
        driver = f"{found.driver or 'version unknown'}, CUDA {cuda_version(found.driver_cuda)}"
    torch = (
        f"{found.torch}, {'CUDA ' + found.torch_cuda if found.torch_cuda else 'CPU only'}"
        if found.torch
        else None
    )
    for name, value in (
        ("driver", driver),
        ("torch", torch),
        ("cuda-python", found.cuda_python),
        ("nvcc", found.nvcc),
        ("CUTLASS", f"nvidia-cutlass {found.cutlass_wheel}" if found.cutlass_wheel else None),
        ("compiler", found.compiler),
        *found.cli_packages.items(),
    ):
        lines.append(_line(name, value or "not found"))
    lines.append("")
    if troubles:
        lines.append("Problems")
        for trouble in troubles:
            lines += [f"  - {trouble.what}", f"    fix: {trouble.fix}"]
    else:
        lines.append("No problems found.")
    return "\n".join(lines)


def render_kernels(rows: list[dict[str, Any]]) -> str:
    """One aligned line per kernel; columns that nothing is known about are left out."""
    columns = [key for key in KERNEL_COLUMNS if any(row[key] is not None for row in rows)]
    table = [[KERNEL_COLUMNS[key] for key in columns]]
    table += [["-" if row[key] is None else str(row[key]) for key in columns] for row in rows]
    widths = [max(len(line[column]) for line in table) for column in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in pairs)
        for pairs in (enumerate(zip(line, widths, strict=True)) for line in table)
    )


def _code_lines(found: Inventory, gpu: Gpu) -> list[str]:
    """What of the CUDA library is ready for a GPU, and what has to be compiled there."""
    cuda = next((one for one in found.libraries if one.target == Target.CUDA.value), None)
    if cuda is None or cuda.error is not None:
        return []
    served = inventory.how_served(cuda, gpu)
    return [_line("  runs", f"{', '.join(families)}: {kind}") for kind, families in served.items()]


def _library_lines(facts: LibraryFacts) -> list[str]:
    purpose = "for NVIDIA GPUs" if facts.target == Target.CUDA.value else "the same kernels on the CPU"
    lines = [f"The {facts.target} library ({purpose})"]
    if facts.error is not None:
        return lines + [f"  {line}" for line in facts.error.splitlines()]
    archs = [f"sm_{arch}" for arch in (facts.archs or "").split(";") if arch]
    compiled = [
        f"CUDA {cuda_version(facts.cuda_runtime)}" if facts.cuda_runtime else "",
        f"CUTLASS {facts.cutlass // 100}.{facts.cutlass // 10 % 10}.{facts.cutlass % 10}"
        if facts.cutlass
        else "",
        f"sanitizers {facts.sanitizers}" if facts.sanitizers else "",
    ]
    lines.append(_line("file", facts.path or ""))
    lines.append(
        _line("built", f"version {facts.version}, space {facts.space}, digest {(facts.digest or '')[:16]}")
    )
    lines.append(_line("with", ", ".join(part for part in compiled if part)))
    if archs:
        lines.append(_line("for", ", ".join(archs)))
    for family, counts in facts.kernels.items():
        per_dim = ", ".join(f"{count} of head_dim {head_dim}" for head_dim, count in counts.items())
        kinds = "; ".join(facts.kinds.get(family, ()))
        lines.append(_line(family, f"{sum(counts.values())} kernels ({kinds}): {per_dim}"))
    return lines


def _line(name: str, value: str) -> str:
    return f"  {name:<12} {value}"
