"""The static gates: what must hold of every kernel's machine code, and the table that records what does.

`problems` checks the code against what the tile implies (expected.py): no local memory,
16-byte global accesses with the exceptions listed there, instruction counts of every main loop, the CTAs per
SM that the launch bounds promise. The table has one line per function with all these numbers, so that a
change of any of them is a line of a diff. Counts stand as `found = derived`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from sdpa_cutlass.library.registry import Family, KernelInfo
from sdpa_cutlass.machine_code import expected
from sdpa_cutlass.machine_code.kernels import KernelCode
from sdpa_cutlass.machine_code.occupancy import SMS, occupancy

ARCH = 89
COMMAND = "python -m sdpa_cutlass profile --static --write-gates tests/build/sass_gates.md"

_COLUMNS = (
    "kernel", "registers", "stack", "local", "smem", "CTAs/SM", "loops", "slots", *expected.COUNTED, "BAR",
    "loads", "stores",
)  # fmt: skip
_LEGEND = """\
Made by `{command}`, checked by `tests/build/test_static_gates.py`.
Compiler: ptxas {compilers}. Code for sm_{arch}.

- `registers` of a thread; `stack` bytes of a thread; `local`: loads and stores of local memory in the code.
- `smem`: bytes of static and dynamic shared memory of a CTA. `CTAs/SM`: how many fit ≥ how many the launch
  bounds promise.
- `loops`: main loops, whose passes take one block of keys each. The columns behind it are of the shortest,
  which needs no mask: `slots` are all its instructions, then those of one kind, as `found = derived` from the
  tile. What is derived holds in every main loop.
- `loads`, `stores`: global accesses of the whole kernel other than cp.async, as bytes : instructions.

Kernels of other families are at the end, by symbol; a row of the unfused family launches several.
Nothing is derived for them.
"""


def problems(code: KernelCode, info: KernelInfo | None) -> list[str]:
    """A line for everything that must hold of a kernel and does not; `info`: its row, if it is fused."""
    found = _memory_problems(code, info)
    if info is not None:
        found += _loop_problems(code, info) + _occupancy_problems(code, info)
    return [f"{code.name}: {problem}" for problem in found]


def _memory_problems(code: KernelCode, info: KernelInfo | None) -> list[str]:
    found = []
    if code.stack_bytes:
        found.append(f"stack is {code.stack_bytes} bytes; it must be 0")
    if code.local_instructions:
        found.append(f"{code.local_instructions} loads and stores of local memory; there must be none")
    if info is not None:
        loads, stores = expected.load_widths(info, code.name), expected.store_widths(info)
    elif code.name.endswith(expected.MERGE):
        loads, stores = expected.MERGE_LOADS, expected.MERGE_STORES
    elif code.name.startswith(Family.FMHA_BWD.value):
        loads, stores = expected.BACKWARD_LOADS, expected.BACKWARD_STORES
    elif code.name.startswith(Family.FMHA_FWD_Q8.value):
        loads = expected.quantized_load_widths(code.name)
        stores = expected.quantized_store_widths(code.name)
    else:
        loads, stores = expected.SOFTMAX_LOADS, {16, 4}
    for group, allowed in (("LDG", loads), ("STG", stores), ("LDGSTS", {16})):
        wrong = {width: n for width, n in code.mix.widths(group).items() if width not in allowed}
        if wrong:
            widths = ", ".join(map(str, sorted(allowed))) or "none"
            found.append(f"{group} of other widths than {widths} bytes: {_widths(wrong)}")
    return found


def _loop_problems(code: KernelCode, info: KernelInfo) -> list[str]:
    found = []
    if len(code.mma_loops) != expected.LOOPS:
        found.append(f"{len(code.mma_loops)} main loops; there must be {expected.LOOPS}")
    derived = expected.loop_counts(info)
    for loop in code.mma_loops:
        for name, count in expected.counted(loop.mix).items():
            if count != derived[name]:
                found.append(
                    f"{count} {name} in the loop at {loop.address:#x}; its tile takes {derived[name]}"
                )
    return found


def _occupancy_problems(code: KernelCode, info: KernelInfo) -> list[str]:
    fits = ctas_per_sm(code, info)
    if fits >= info.ctas_per_sm:
        return []
    return [f"{fits} CTAs fit on an SM of sm_{ARCH}; the launch bounds promise {info.ctas_per_sm}"]


def ctas_per_sm(code: KernelCode, info: KernelInfo, arch: int = ARCH) -> int:
    """CTAs of a fused kernel that fit on one SM."""
    smem = code.static_smem_bytes + info.smem_bytes
    return occupancy(SMS[arch], threads=info.threads, registers=code.registers, smem_bytes=smem).ctas


def render(kernels: Sequence[KernelCode], infos: Mapping[str, KernelInfo]) -> str:
    """The table as Markdown, fused kernels first. `infos`: the rows of the fused family by symbol."""
    fused = [code for code in kernels if code.name in infos]
    others = [code for code in kernels if code.name not in infos]
    compilers = ", ".join(sorted({code.compiler for code in kernels}))
    lines = [
        "# Static gates",
        "",
        _LEGEND.format(command=COMMAND, compilers=compilers, arch=ARCH),
        "| " + " | ".join(_COLUMNS) + " |",
        "|---|" + "--:|" * (len(_COLUMNS) - 1),
    ]
    lines += ["| " + " | ".join(_cells(code, infos.get(code.name))) + " |" for code in [*fused, *others]]
    return "\n".join(lines) + "\n"


def fused_rows(rows: Sequence[KernelInfo]) -> dict[str, KernelInfo]:
    """The rows of the fused family by the symbols of their functions."""
    fused = [row for row in rows if row.family is Family.FMHA_FWD]
    return {symbol: row for row in fused for symbol in expected.symbols(row)}


def parse(text: str) -> dict[str, dict[str, str]]:
    """The lines of a table by kernel, each with its cells by column."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []
        if len(cells) == len(_COLUMNS) and cells[0] != _COLUMNS[0]:
            rows[cells[0]] = dict(zip(_COLUMNS, cells, strict=True))
    return rows


def only(text: str, names: Container[str]) -> str:
    """A table without the lines of kernels that are not in `names`."""
    rows = parse(text)
    lines = text.splitlines(keepends=True)
    cells = [line.strip("|").split("|")[0].strip() for line in lines]
    return "".join(line for line, name in zip(lines, cells, strict=True) if name not in rows or name in names)


def compilers_of(text: str) -> str:
    """The releases of ptxas that a table names."""
    start = "Compiler: ptxas "
    line = next((line for line in text.splitlines() if line.startswith(start)), start)
    return line.removeprefix(start).partition(". ")[0]


def differences(committed: str, built: str) -> list[str]:
    """A line for every cell in which two tables differ, and for every kernel that only one of them has."""
    before, now = parse(committed), parse(built)
    found = [f"{name}: not in the library" for name in before if name not in now]
    found += [f"{name}: not in the table" for name in now if name not in before]
    for name in before.keys() & now.keys():
        for column in _COLUMNS:
            if before[name][column] != now[name][column]:
                found.append(f"{name}: {column} was {before[name][column]}, is {now[name][column]}")
    return sorted(found)


def _cells(code: KernelCode, info: KernelInfo | None) -> list[str]:
    loop = code.main_loop
    counts = expected.counted(loop.mix) if loop else {}
    derived = expected.loop_counts(info) if info else {}
    smem, ctas = str(code.static_smem_bytes), "-"
    if info is not None:
        smem = str(code.static_smem_bytes + info.smem_bytes)
        ctas = f"{ctas_per_sm(code, info)} ≥ {info.ctas_per_sm}"
    counted = [
        f"{counts[name]} = {derived[name]}" if name in derived and counts else str(counts.get(name, "-"))
        for name in expected.COUNTED
    ]
    return [
        code.name,
        str(code.registers),
        str(code.stack_bytes),
        str(code.local_instructions),
        smem,
        ctas,
        str(len(code.mma_loops)),
        str(loop.mix.instructions) if loop else "-",
        *counted,
        str(loop.mix.count(r"BAR\.")) if loop else "-",
        _widths(code.mix.widths("LDG")),
        _widths(code.mix.widths("STG")),
    ]


def _widths(widths: Mapping[int, int]) -> str:
    return " ".join(f"{width}:{count}" for width, count in widths.items()) or "-"
