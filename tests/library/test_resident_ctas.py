"""The CTAs that prices let share an SM, against the registers of the committed table of machine code."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdpa_cutlass import Family, KernelInfo, kernels
from sdpa_cutlass.choice.cost import ctas
from sdpa_cutlass.choice.cost.corrections import name_of
from sdpa_cutlass.choice.cost.ctas import resident_ctas
from sdpa_cutlass.library.device import DeviceInfo
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.machine_code.occupancy import SMS, occupancy
from tests.library.decoding import H200, L4

GATES = Path(__file__).parents[1] / "build/sass_gates.md"
CARDS = {90: H200, 89: L4}


def registers_by_kernel() -> dict[str, int]:
    """Of a thread, in code for sm_89."""
    rows = (line.split("|") for line in GATES.read_text(encoding="utf-8").splitlines())
    return {row[1].strip(): int(row[2]) for row in rows if len(row) > 2 and row[1].startswith(" fmha_fwd_")}


def fitting(row: KernelInfo, registers: int, arch: int) -> int:
    """What there is room for, as profilers say."""
    found = occupancy(SMS[arch], threads=row.threads, registers=registers, smem_bytes=row.smem_bytes)
    return found.ctas


@pytest.mark.parametrize(("arch", "card"), CARDS.items(), ids=["sm_90", "sm_89"])
def test_no_more_ctas_share_an_sm_than_fit(arch: int, card: DeviceInfo) -> None:
    registers = registers_by_kernel()
    rows = [row for row in kernels(Target.HOST) if row.family is Family.FMHA_FWD]
    listed = set()
    assert rows
    for row in rows:
        resident = resident_ctas(row, card)
        assert resident <= fitting(row, registers[row.name], arch), row.name
        if (known := ctas.REGISTERS.get(name_of(row))) is not None:
            listed.add(name_of(row))
            assert registers[row.name] <= known
            assert resident == fitting(row, known, arch), row.name
    assert listed == set(ctas.REGISTERS)
