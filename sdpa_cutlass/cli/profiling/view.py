"""The `profile` command's screens: one kernel's code, a table of many, and the diagnosis of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sdpa_cutlass.cli.profiling import static
from sdpa_cutlass.cli.profiling.diagnosis import (
    Diagnosis,
    conflict_share,
    diagnose,
    stalls,
    utilisations,
)
from sdpa_cutlass.cli.profiling.ncu import Counters
from sdpa_cutlass.cli.profiling.problems import Task
from sdpa_cutlass.cli.summary import tile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNITS = {
    "tensor": "tensor cores",
    "issue": "issue slots",
    "xu": "XU (ex2)",
    "alu": "ALU",
    "fma": "FMA",
    "shared": "shared memory",
}
_SHORT = {"convert": "cvt", "shuffle": "shfl", "barrier": "bar", "branch": "bra", "uniform": "unif"}
_TABLE_CARDS = ("L4", "H200")
_TOP_STALLS = 5
_LAUNCH_UNITS = {
    "tensor": "tensor_pct",
    "issue": "issue_pct",
    "XU": "xu_pct",
    "shared": "shared_pct",
    "L2": "l2_pct",
    "DRAM": "dram_pct",
}


def show_static(console: Console, kernels: Sequence[dict[str, Any]]) -> None:
    """One kernel in detail, several as a table."""
    if len(kernels) == 1:
        _show_kernel(console, kernels[0])
    else:
        _show_kernels(console, kernels)
    for kernel in kernels:
        for problem in kernel["problems"]:
            console.print(problem, style="bold red", markup=False, highlight=False)


def _show_kernels(console: Console, kernels: Sequence[dict[str, Any]]) -> None:
    archs = "/".join(str(arch) for arch in static.ARCHS)
    table = _table(
        ["kernel", "regs", "stack", "smem", f"CTAs {archs}", "slots", "MMA", "ratio", *_TABLE_CARDS],
        left=("kernel", *_TABLE_CARDS),
    )
    for kernel in kernels:
        loop = static.main_loop(kernel)
        occupancy = kernel["occupancy"] or {}
        table.add_row(
            kernel["name"],
            str(kernel["registers"]),
            str(kernel["stack_bytes"]),
            str(kernel["static_smem_bytes"] + (kernel["dynamic_smem_bytes"] or 0)),
            "/".join(str(found["ctas"]) for found in occupancy.values()) or "-",
            *((str(loop["slots"]), str(loop["mmas"]), f"{loop['slots_per_mma']:.2f}") if loop else "---"),
            *(_busiest(loop["cycles"][card]) if loop else "-" for card in _TABLE_CARDS),
        )
    console.print(table)
    console.print()
    console.print(_footnote(kernels), highlight=False, markup=False)
    cards = "Per card: the unit that a pass keeps busy longest, and the next one as a share of it."
    console.print(cards, highlight=False, markup=False)


def _show_kernel(console: Console, kernel: dict[str, Any]) -> None:
    local = kernel["local_instructions"]
    threads = f"{kernel['threads']} threads, " if kernel["threads"] else ""
    dynamic = kernel["dynamic_smem_bytes"]
    smem = f"{kernel['static_smem_bytes'] + (dynamic or 0)} bytes of shared memory"
    stack = "no local memory"
    if local:
        stack = f"{kernel['stack_bytes']} bytes of stack, {local} loads and stores of local memory"
    console.print(kernel["name"], style="bold", highlight=False, markup=False)
    console.print(
        f"{threads}{kernel['registers']} registers, {stack}, {smem}, {kernel['code_bytes']} bytes of code "
        f"for sm_{kernel['arch']} by ptxas {kernel['compiler']}",
        highlight=False,
    )
    if kernel["occupancy"]:
        table = _table(["one SM of", "CTAs", "warps", "of", "limited by"], left=("one SM of", "limited by"))
        for arch, found in kernel["occupancy"].items():
            numbers = (str(found[key]) for key in ("ctas", "warps", "max_warps"))
            table.add_row(arch, *numbers, found["limited_by"])
        console.print(table)
    console.print()
    _show_loops(console, kernel["loops"])
    loop = static.main_loop(kernel)
    if loop:
        _show_costs(console, loop)
    console.print(_footnote([kernel]), highlight=False, markup=False)


def _show_loops(console: Console, loops: Sequence[dict[str, Any]]) -> None:
    groups = static.columns_of(loops)
    headers = [_SHORT.get(group, group) for group in groups]
    table = _table(["loop at", "", "slots", "always", "ratio", *headers], left=("",))
    for loop in loops:
        ratio = loop["slots_per_mma"]
        table.add_row(
            f"{loop['address']:#x}",
            "main" if loop["is_main"] else "",
            str(loop["slots"]),
            str(loop["always"]),
            f"{ratio:.2f}" if ratio else "-",
            *(str(loop["groups"].get(group, "")) for group in groups),
        )
    console.print(table)
    console.print()


def _show_costs(console: Console, loop: dict[str, Any]) -> None:
    table = _table(["cycles of a quarter SM, one warp's pass", *static.CARDS], left=())
    table.columns[0].justify = "left"
    tops = {card: max(loop["cycles"][card].values()) for card in static.CARDS}
    for unit, name in _UNITS.items():
        cells = []
        for card in static.CARDS:
            cycles = loop["cycles"][card][unit]
            cells.append(f"{cycles:.0f} ({cycles / tops[card]:.0%})")
        table.add_row(name, *cells)
    console.print(table)
    console.print()


def _busiest(cycles: dict[str, float]) -> str:
    """The busiest unit, and the next one as a share of it."""
    first = static.busiest(cycles)
    second = static.busiest({unit: value for unit, value in cycles.items() if unit != first})
    return f"{first}, {second} {cycles[second] / cycles[first]:.0%}"


def _footnote(kernels: Sequence[dict[str, Any]]) -> str:
    compilers = ", ".join(sorted({kernel["compiler"] for kernel in kernels}))
    return (
        f"Registers are those of the sm_89 code (ptxas {compilers}); sm_90 runs its driver's own.\n"
        "A pass of the main loop takes one block of keys that needs no mask. Slots: its instructions;\n"
        "always: those that no branch goes around; ratio: slots per MMA. Cycles come from instruction\n"
        "counts and published rates, not from a clock."
    )


def show_launch(console: Console, task: str, counters: Counters, found: Diagnosis) -> None:
    """The diagnosis of one launch, with what it rests on."""
    console.print(f"{counters.kernel}", style="bold", highlight=False, markup=False)
    console.print(f"{task}: {_launch_line(counters)}", highlight=False, markup=False)
    console.print(f"\nbound by  {found.bound}", style="bold", highlight=False, markup=False)
    for line in found.evidence:
        console.print(f"  because {line}", highlight=False, markup=False)
    console.print(f"  try     {found.hint}\n", highlight=False, markup=False)
    table = _table(["unit", "% of peak", "warps wait for", "% of warp time"], left=("unit", "warps wait for"))
    units = [(bound.name, f"{value:.1f}") for bound, value in utilisations(counters)]
    waits = [(reason, f"{share:.1%}".rstrip("%")) for reason, share in stalls(counters)[:_TOP_STALLS]]
    for index in range(max(len(units), len(waits))):
        cells = [*_at(units, index), *_at(waits, index)]
        table.add_row(*cells)
    console.print(table)
    console.print()
    console.print(_memory_line(counters), highlight=False, markup=False)


def show_launches(console: Console, launches: Sequence[tuple[str | None, Task, Counters]]) -> None:
    """Several launches, a line each: time, use of the units in percent of their peaks, the longest wait."""
    table = _table(
        ["problem", "kernel", "µs", "waves", *_LAUNCH_UNITS, "warps wait for", "bound by"],
        left=("problem", "kernel", "warps wait for", "bound by"),
    )
    for _, task, counters in launches:
        duration, waves = counters.get("duration_ns"), counters.get("waves")
        units = {bound.counter: value for bound, value in utilisations(counters)}
        reason, share = next(iter(stalls(counters)), ("-", 0.0))
        table.add_row(
            task.shape + (" bf16" if task.dtype == "bf16" else ""),
            tile(counters.kernel),
            f"{duration / 1e3:.1f}" if duration is not None else "-",
            f"{waves:.2f}" if waves is not None else "-",
            *(f"{units[counter]:.0f}" if counter in units else "-" for counter in _LAUNCH_UNITS.values()),
            f"{reason} {share:.0%}",
            diagnose(counters).bound,
        )
    gpus = ", ".join(dict.fromkeys(gpu or "GPU unknown" for gpu, _, _ in launches))
    console.print(f"{gpus}; units in % of their peaks", highlight=False, markup=False)
    console.print(table)


def _at(pairs: Sequence[tuple[str, str]], index: int) -> tuple[str, str]:
    return pairs[index] if index < len(pairs) else ("", "")


def _launch_line(counters: Counters) -> str:
    duration, hertz = counters.get("duration_ns"), counters.get("sm_hz")
    parts = [
        f"{duration / 1e3:.2f} µs" if duration is not None else "",
        f"at {hertz / 1e9:.2f} GHz" if hertz else "",
    ]
    line = " ".join(part for part in parts if part)
    for text, name in (
        ("{:.0f} CTAs", "grid"),
        ("of {:.0f} threads", "threads"),
        ("on {:.0f} SMs", "sms"),
        ("{:.2f} waves", "waves"),
        ("{:.0f} registers", "registers"),
        ("SMs active {:.0f} %", "sm_active_pct"),
        ("occupancy {:.0f} %", "occupancy_pct"),
    ):
        value = counters.get(name)
        if value is not None:
            line += (" " if text.startswith(("of", "on")) else ", ") + text.format(value)
    return line


def _memory_line(counters: Counters) -> str:
    conflicts = ", ".join(
        f"{kind} {value:.0f}"
        for kind in ("ldsm", "ld", "st")
        if (value := counters.get(f"conflicts_{kind}")) is not None
    )
    parts = [
        f"bank conflicts: {conflicts or 'not counted'} ({conflict_share(counters):.1%} of all wavefronts)"
    ]
    for text, name in (("L2 {:.1f} MB", "l2_bytes"), ("DRAM read {:.1f} MB", "dram_read_bytes"),
                       ("written {:.1f} MB", "dram_write_bytes")):  # fmt: skip
        value = counters.get(name)
        if value is not None:
            parts.append(text.format(value / 1e6))
    hit = counters.get("l2_hit_pct")
    if hit is not None:
        parts.insert(2, f"hit rate {hit:.0f} %")
    return "; ".join(parts)


def _table(headers: Sequence[str], left: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, justify="left" if header in left else "right", no_wrap=True)
    return table
