"""How much faster quantised attention should be on Ada: a prediction from the machine code for sm_89.

    make cuda SPACE=release CUDA_KERNELS='fmha_fwd_q8_sm89_*_f16_*,fmha_fwd_sm89_*_f16'
    python -m benchmarks.quantised_on_ada [--json FILE]

No GPU takes part, and nothing here is a measurement. Of each kernel the instructions of a whole pass of the
main loop count (machine_code/loops.py), in clocks of a quarter of an SM for a score of a thread, of three
units:

    tensor   HMMA and IMMA at the card's rates (bytes: 2048 operations a clock and SM on both cards)
    softmax  ex2, 8 clocks each, and every other instruction that is neither a product nor ldmatrix
    shared   ldmatrix and the like, 128 bytes a clock and SM

The busiest unit is never hidden, and of the others a share that the model of the exact kernels was fitted
with on an H200 (choice/cost/fmha_fwd.py); whether it is the same on Ada nobody has measured. Calls of 16
heads and 16384 tokens fill the card at its boost clock, which an L4 cannot hold at its 72 W. The pass that
makes bytes reads and writes DRAM, whatever a cache may hold, behind a launch of its own. The exact kernel is
the fastest by the same arithmetic.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpa_cutlass.choice.cost.model import LAUNCH_CYCLES, overlapping
from sdpa_cutlass.choice.cost.quantised import INT8_PASS_BYTES, INT8_QK_PASS_BYTES
from sdpa_cutlass.cli.predictions import L4, RTX_4090, Card
from sdpa_cutlass.cli.results import write_atomically
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import DRAM_SHARE
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Accuracy, Family, KernelInfo, read_kernels
from sdpa_cutlass.machine_code import kernels
from sdpa_cutlass.machine_code.gates_q8 import scores_of_a_thread
from sdpa_cutlass.machine_code.kernels import KernelCode
from sdpa_cutlass.machine_code.mix import Mix
from sdpa_cutlass.problem import DType

FORMAT = 1
ARCH = 89
CARDS = (RTX_4090, L4)
THREADS_PER_CLOCK = 128  # of an SM that issues at its full rate
HEADS, TOKENS = 16, 16384
SEQLENS = (1024, 2048, 4096, 8192, 16384)
HEADS_PER_KEY_HEAD = (1, 4)
PASS_BYTES = {Accuracy.INT8: INT8_PASS_BYTES, Accuracy.INT8_QK: INT8_QK_PASS_BYTES}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A kernel on a card. Clocks are those of a quarter of an SM, for a score of a thread."""

    kernel: str
    head_dim: int
    accuracy: Accuracy
    instructions: float  # a score
    units: Mapping[str, float]

    @property
    def clocks(self) -> float:
        """Of the busiest unit, and the share of the others that it does not hide."""
        return overlapping(tuple(self.units.values()))

    def tflops(self, card: Card) -> float:
        """At the card's boost clock."""
        per_clock = 4 * self.head_dim * THREADS_PER_CLOCK / self.clocks
        return per_clock * card.device.sms * card.boost_ghz / 1e3

    def microseconds(self, card: Card, seqlen: int, heads_per_key_head: int) -> float:
        """Of a whole call."""
        scores = TOKENS * seqlen * HEADS
        attention = scores * self.clocks / (THREADS_PER_CLOCK * card.device.sms * card.boost_ghz * 1e3)
        launch = LAUNCH_CYCLES / (card.boost_ghz * 1e3)
        if self.accuracy is Accuracy.EXACT:
            return launch + attention
        elements = TOKENS * HEADS // heads_per_key_head * self.head_dim
        made = elements * PASS_BYTES[self.accuracy] / (DRAM_SHARE * card.device.dram_gbps * 1e3)
        return 2 * launch + made + attention


def predict(code: KernelCode, kernel: KernelInfo, card: Card) -> Predicted:
    """From the loop that masks nothing."""
    loop = min(code.mma_loops, key=lambda loop: loop.whole.instructions)
    scores = scores_of_a_thread(kernel)
    return Predicted(
        kernel=kernel.name,
        head_dim=kernel.head_dim,
        accuracy=kernel.accuracy,
        instructions=loop.whole.instructions / scores,
        units={unit: clocks / scores for unit, clocks in _units(loop.whole, card).items()},
    )


def _units(mix: Mix, card: Card) -> dict[str, float]:
    cycles = mix.cycles(card.device.mma_flops_per_clock)
    elsewhere = sum(mix.groups[group] for group in ("HMMA", "IMMA", "LDSM", "MUFU"))
    return {
        "tensor": cycles["tensor"],
        "softmax": cycles["xu"] + mix.instructions - elsewhere,
        "shared": cycles["shared"],
    }


def rows_of(code: Mapping[str, KernelCode], infos: Sequence[KernelInfo]) -> list[dict[str, Any]]:
    """For every card, head_dim and quantised kernel a row, next to the fastest exact kernel."""
    plain = [info for info in infos if info.name in code and info.dtype is DType.F16 and not info.is_split]
    found = []
    for card in CARDS:
        by_name = {info.name: predict(code[info.name], info, card) for info in plain}
        exact = [by_name[i.name] for i in plain if i.family is Family.FMHA_FWD and not i.is_general]
        for info in plain:
            if info.family is not Family.FMHA_FWD_Q8:
                continue
            own = by_name[info.name]
            beside = [row for row in exact if row.head_dim == info.head_dim]
            if not beside:
                continue
            fastest = min(beside, key=lambda row: row.clocks)
            found.append(
                {
                    "card": card.name,
                    "quantised": _record(own, card),
                    "exact": _record(fastest, card),
                    "over_exact": {
                        f"{seqlen}, {heads}:1": fastest.microseconds(card, seqlen, heads)
                        / own.microseconds(card, seqlen, heads)
                        for heads in HEADS_PER_KEY_HEAD
                        for seqlen in SEQLENS
                    },
                }
            )
    return found


def _record(row: Predicted, card: Card) -> dict[str, Any]:
    known = dataclasses.asdict(row) | {"accuracy": row.accuracy.name}
    return known | {"clocks": row.clocks, "tflops_at_boost": row.tflops(card)}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """In Markdown: TFLOP/s without the pass, and how many times as fast whole calls are."""
    columns = [f"{n // 1024}K" for n in SEQLENS]
    head = ["card", "kernel", "clocks a score", "TFLOP/s", "exact", *columns, *(f"4:1, {c}" for c in columns)]
    lines = [f"| {' | '.join(head)} |", "|---|---|" + "--:|" * (len(head) - 2)]
    for row in rows:
        own, exact = row["quantised"], row["exact"]
        cells = [
            row["card"],
            f"`{own['accuracy'].lower()}`, D = {own['head_dim']}",
            f"{own['clocks']:.1f}",
            f"{own['tflops_at_boost']:.0f}",
            f"{exact['tflops_at_boost']:.0f}",
            *(f"{ratio:.2f}" for ratio in row["over_exact"].values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, of the CUDA library that is found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantised_on_ada")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    native = library(Target.CUDA)
    infos = read_kernels(native)
    wanted = {info.name for info in infos if info.family in (Family.FMHA_FWD, Family.FMHA_FWD_Q8)}
    code = {found.name: found for found in kernels.read(native.path, arch=ARCH) if found.name in wanted}
    rows = rows_of(code, infos)
    print("\n".join(table(rows)))
    if options.json:
        compilers = sorted({found.compiler for found in code.values()})
        document = {"format": FORMAT, "is_prediction": True, "compilers": compilers, "rows": rows}
        write_atomically(options.json, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
