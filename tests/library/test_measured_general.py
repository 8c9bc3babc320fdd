"""General kernels of both families of exact kernels: the cheapest is among the fastest that were timed.

On an H200: some by hand (2026-11-25), and what `benchmarks.compare_kernels` wrote.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.documents import kernel_rows
from sdpa_cutlass import Causal, DType, Problem
from sdpa_cutlass.choice.cost import estimate
from sdpa_cutlass.cli import predictions

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

# What is asked, batch, heads, seqlen, head_dim: µs, by family, arch and tile.
Setting = tuple[str, int, int, int, int]
GENERAL: dict[Setting, dict[str, float]] = {
    ("causal", 32, 32, 512, 64): {
        "sm90_d64_m192n128_s3_w16": 184,
        "sm89_d64_m128n64_s2_w4_qreg": 186,
        "sm89_d64_m64n64_s1_w4": 195,
        "sm90_d64_m128n128_s3_w12": 211,
    },
    ("packed_causal", 32, 32, 512, 64): {
        "sm89_d64_m64n64_s1_w4": 152,
        "sm89_d64_m128n64_s2_w4_qreg": 156,
        "sm90_d64_m192n128_s3_w16": 158,
        "sm90_d64_m128n128_s3_w12": 186,
    },
    ("causal", 8, 32, 2048, 64): {
        "sm90_d64_m192n128_s3_w16": 353,
        "sm90_d64_m128n128_s3_w12": 425,
        "sm89_d64_m128n64_s2_w4_qreg": 483,
        "sm89_d64_m64n64_s1_w4": 541,
    },
    ("packed_causal", 8, 32, 2048, 64): {
        "sm90_d64_m192n128_s3_w16": 239,
        "sm90_d64_m128n128_s3_w12": 293,
        "sm89_d64_m128n64_s2_w4_qreg": 328,
        "sm89_d64_m64n64_s1_w4": 357,
    },
    ("causal", 32, 16, 512, 128): {
        "sm90_d128_m192n80_s3_w16": 128,
        "sm90_d128_m128n128_s2_w12": 135,
        "sm89_d128_m128n32_s2_w4": 168,
        "sm89_d128_m64n64_s1_w4": 180,
    },
}


def committed() -> dict[Setting, dict[str, float]]:
    """What benchmarks.compare_kernels wrote."""
    found = {}
    text = (RESULTS / "compare_kernels" / "2026-11-27-h200-f16.json").read_text(encoding="utf-8")
    for row in json.loads(text)["rows"]:
        kind, *sizes, _ = row["problem"].split()
        batch, heads, seqlen, head_dim = (int(size.lstrip("bhsd")) for size in sizes)
        found[kind, batch, heads, seqlen, head_dim] = {
            name.removeprefix("fmha_fwd_").removesuffix("_f16_general"): time
            for name, time in row["times_us"].items()
            if name.startswith("fmha_fwd_")
        }
    return found


GENERAL |= committed()


@pytest.mark.parametrize("setting", GENERAL, ids=lambda setting: "-".join(map(str, setting)))
def test_general_kernels_of_both_families_are_ranked(setting: Setting) -> None:
    kind, batch, heads, seqlen, head_dim = setting
    problem = Problem(
        dtype=DType.F16,
        batch=batch,
        num_heads_q=heads,
        num_heads_kv=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        causal=Causal.TOP_LEFT if kind in ("causal", "packed_causal", "sinks") else None,
        has_lengths=kind in ("lengths", "packed", "packed_causal"),
        window=(seqlen // 4 - 1, 0) if kind == "window" else None,
        has_sinks=kind == "sinks",
    )
    kernels = {kernel.name: kernel for kernel in kernel_rows.release()}
    times = GENERAL[setting]
    prices = {
        name: estimate(kernels[f"fmha_fwd_{name}_f16_general"], problem, predictions.H200.device).cycles
        for name in times
    }
    assert times[min(prices, key=prices.__getitem__)] <= 1.08 * min(times.values())
