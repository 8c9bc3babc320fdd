"""Predictions: how good the cost models are where something was measured, and what is said elsewhere."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.documents import family_results, kernel_rows, model_quality, prediction_tables
from benchmarks.documents.model_quality import Quality
from sdpa_cutlass import DType, Problem
from sdpa_cutlass.choice import cost
from sdpa_cutlass.choice.cost import MODELS
from sdpa_cutlass.choice.cost.fmha_fwd_q8 import FmhaFwdQ8Split
from sdpa_cutlass.choice.cost.model import CLOCK_GHZ
from sdpa_cutlass.cli import results, suites
from sdpa_cutlass.cli.predictions import (
    CARDS,
    H200,
    L4,
    RTX_4090,
    predict,
    problem_with_masks,
    row_of,
)
from sdpa_cutlass.cli.results import Results
from sdpa_cutlass.cli.roofline import DATASHEETS
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import HOST
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family, KernelInfo, read_kernels

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FOLDERS = ("", "quantised", "backward")
KERNELS = "tuning/2026-11-26-h200-backward-kernels.json"
FILES = [*sorted(path for folder in FOLDERS for path in (RESULTS / folder).glob("*.json")), RESULTS / KERNELS]
# Of other families 50.
LEAST_ROWS = {"fmha_fwd_q8": 10, "fmha_fwd_q8_sm90": 10, "fmha_bwd": 19, "fmha_bwd_fused": 17}


@pytest.fixture(scope="module")
def committed() -> list[Results]:
    return [family_results.from_json(path.read_text(encoding="utf-8"), origin=path.name) for path in FILES]


@pytest.fixture(scope="module")
def found(committed: list[Results]) -> dict[str, Quality]:
    """By family, decode apart."""
    return {one.what: one for one in model_quality.qualities(committed)}


@pytest.mark.parametrize(
    ("family", "suite"),
    [
        *((family.value, "") for family in MODELS),
        ("fmha_fwd", ", decode"),
        ("unfused", ", decode"),
    ],
)
def test_every_familys_model_is_good_on_the_committed_results(
    family: str, suite: str, found: dict[str, Quality]
) -> None:
    """Rank correlation of 0.9 and a median error of 15 % at least."""
    one = found[family + suite]
    assert one.rows >= (20 if suite else LEAST_ROWS.get(family, 50))
    assert one.rank is not None
    assert one.rank >= 0.9
    assert one.error <= 0.15
    assert one.is_good


def test_decoding_from_bytes_is_priced() -> None:
    """One query over a QuantizedKV: predicted over measured microseconds of the second launch alone."""
    found = json.loads((RESULTS / "tuning" / "2026-11-26-h200-decode-8-bits.json").read_text())
    ratios = []
    for row in found["rows"]:
        problem = Problem(
            dtype=DType(row["dtype"]),
            **{name: row[name] for name in ("batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k")},
            head_dim=row["head_dim"],
        )
        for kernel in kernel_rows.release():
            measured = row["gpu_us"].get(kernel.accuracy.name.lower())
            asked = (Family.FMHA_FWD_Q8, problem.dtype, problem.head_dim)
            if measured and kernel.is_split and (kernel.family, kernel.dtype, kernel.head_dim) == asked:
                cycles, _ = FmhaFwdQ8Split(kernel, problem, H200.device).cost_of_held(problem)
                ratios.append(cycles / (1e3 * CLOCK_GHZ) / measured)
    assert len(ratios) == 28
    assert all(0.85 < ratio < 1.12 for ratio in ratios)
    assert statistics.median(abs(ratio - 1) for ratio in ratios) < 0.05


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_model_that_is_off_is_found(
    factor: float, committed: list[Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any) -> cost.Estimate:
        right = cost.estimate(*arguments)
        return dataclasses.replace(right, microseconds=factor * right.microseconds)

    monkeypatch.setattr(model_quality, "estimate", wrong)
    assert not any(one.is_good for one in model_quality.qualities(committed))


def test_no_family_is_without_measurements(committed: list[Results]) -> None:
    assert model_quality.unmeasured(committed) == []
    without = [
        found
        for found, path in zip(committed, FILES, strict=True)
        if "backward" not in str(path.relative_to(RESULTS))
    ]
    assert model_quality.unmeasured(without) == ["fmha_bwd", "fmha_bwd_fused"]


def test_gradients_of_large_head_dims() -> None:
    """Median error at 192 and 256, on an H100, which the model knows as it knows an H200."""
    found = _read("backward/2026-11-26-h100-f16-head-dim-192-256.json")
    kernels = {row.name: row for row in kernel_rows.release()}
    ratios = []
    for row in found.rows:
        assert row.kernel is not None
        assert row.gpu_us is not None
        predicted = cost.estimate(kernels[row.kernel], problem_with_masks(row), H200.device)
        ratios.append(predicted.microseconds / row.gpu_us)
    assert len(ratios) == 12
    assert statistics.median(abs(ratio - 1) for ratio in ratios) <= 0.03
    assert all(0.85 <= ratio <= 1.15 for ratio in ratios)


@pytest.mark.parametrize("path", sorted((RESULTS / "backward").glob("*.json")), ids=lambda path: path.name)
def test_gradients_were_right_where_they_were_timed(path: Path) -> None:
    assert json.loads(path.read_text(encoding="utf-8"))["wrong"] == []


def test_files_of_other_commands_as_rows() -> None:
    """What was timed and by which kernel; peers do not count."""
    quantised = _read("quantised/2026-11-28-h200.json")
    assert quantised.env["gpu"] == "NVIDIA H200"
    assert {row.kernel.partition("_sm")[0] for row in quantised.rows if row.kernel} == {"fmha_fwd_q8"}
    assert quantised.rows[0].gpu_us == pytest.approx(228.5, abs=0.1)
    backward = _read("backward/2026-11-28-h200-f16.json")
    assert {row.kernel for row in backward.rows} == {
        "fmha_bwd_fused_sm89_d64_m32n128_s2_w4_f16",
        "fmha_bwd_sm89_d64_m64n64_s2_w4_q64k64_f16",
        "fmha_bwd_sm89_d128_m32n64_s2_w4_q64k64_f16",
    }
    assert [(row.seqlen_q, row.causal, row.provider) for row in backward.rows[5:7]] == [
        (16384, False, "fused"),
        (512, True, "fused"),
    ]
    assert backward.rows[0].gpu_us == pytest.approx(881.2, abs=0.1)
    both = _read(KERNELS)
    assert [row.kernel.partition("_sm89")[0] for row in both.rows if row.kernel] == 6 * [
        "fmha_bwd_fused", "fmha_bwd_fused", "fmha_bwd"
    ] + 6 * ["fmha_bwd_fused", "fmha_bwd"]  # fmt: skip
    assert both.rows[0].gpu_us == pytest.approx(905, abs=1)
    assert _read("backward/2026-11-26-h200-suites.json").rows == []
    with pytest.raises(results.ResultFormatError, match="broken: KeyError"):
        family_results.from_json('{"times": []}', origin="broken")
    with pytest.raises(results.ResultFormatError, match="broken"):
        family_results.from_json("{", origin="broken")


def _read(name: str) -> Results:
    return family_results.from_json((RESULTS / name).read_text(encoding="utf-8"), origin=name)


def test_a_model_that_ranks_badly_is_found(committed: list[Results], monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(kernel: KernelInfo, problem: Any, device: Any) -> cost.Estimate:
        return dataclasses.replace(
            cost.estimate(kernel, problem, device), microseconds=700 / problem.seqlen_k
        )

    monkeypatch.setattr(model_quality, "estimate", constant)
    ranks = [one.rank for one in model_quality.qualities(committed)]
    assert all(rank is not None and rank < 0.9 for rank in ranks)


def test_rows_that_do_not_count(committed: list[Results]) -> None:
    """Those of other cards, of peers, of kernels that are gone, and those that failed."""
    row = next(row for row in committed[0].rows if row.provider == "fused" and row.ok)
    counted = {"gpu": "NVIDIA H200"}
    assert model_quality.qualities([Results(counted, [row])])[0].rows == 1
    for env, other in (
        ({"gpu": "NVIDIA A100-SXM4-80GB"}, row),
        (counted, dataclasses.replace(row, provider="torch_flash")),
        (counted, dataclasses.replace(row, kernel="fmha_fwd_sm89_d64_m1n1_s1_w1_f16")),
        (counted, dataclasses.replace(row, status="wrong: NaN")),
        (counted, dataclasses.replace(row, gpu_us=None)),
    ):
        assert model_quality.qualities([Results(env, [other])]) == []


def test_rows_from_the_generator_are_those_of_the_library() -> None:
    built = {row.name: row for row in read_kernels(library(Target.HOST))}
    for row in kernel_rows.release():
        if row.name in built:
            assert row == dataclasses.replace(built[row.name], index=row.index)


def test_the_choice_is_the_librarys() -> None:
    """What is predicted for an L4 is what the host library, which stands for one, chooses."""
    from sdpa_cutlass.choice.select import offer

    native = library(Target.HOST)
    rows = read_kernels(native)
    device = dataclasses.replace(L4.device, target=HOST.target, name=HOST.name)
    assert device == HOST
    for case in suites.cases_of(["mission", "small", "long", "masks"]):
        row = row_of(case)
        prediction = predict(rows, row, L4)
        if prediction is not None and not row.p_dropout:
            problem = model_quality.problem_with_masks(row)
            first, _ = next(iter(offer(native, problem, Family.FMHA_FWD, HOST).ranked(problem)))
            assert prediction.kernel.name == first.name, case.name


def test_cards_are_those_of_their_datasheets() -> None:
    """Peaks with float32 sums: on GeForce half of what the datasheet has for float16 sums."""
    assert L4.peak_tflops == pytest.approx(121.0, rel=5e-3)
    assert RTX_4090.peak_tflops == pytest.approx(330.3 / 2, rel=5e-3)
    assert H200.peak_tflops == 989.4
    assert [card.device.compute_capability for card in CARDS] == [(8, 9), (8, 9), (9, 0)]
    for card in CARDS:
        assert card.device.dram_gbps == DATASHEETS[card.name].dram_gbps


def test_no_prediction_is_below_its_floor() -> None:
    for case in suites.cases_of(["mission", "small", "long", "hopper"]):
        for card in CARDS:
            found = predict(kernel_rows.release(), row_of(case), card)
            assert found is not None
            assert found.microseconds >= found.floor_us
            assert found.microseconds_at_boost >= found.floor_us
            assert card.boost_ghz < CLOCK_GHZ or found.microseconds_at_boost <= found.microseconds
            assert (found.kernel.family is Family.FMHA_FWD_SM90) <= (card is H200)


def test_small_tiles_spread_the_mission_over_few_sms() -> None:
    kernels = kernel_rows.release()
    others = [kernel for kernel in kernels if "_d64_m32n32_s1_w4_g2_" not in kernel.name]
    for case in suites.mission():
        found, before = (predict(rows, row_of(case), L4) for rows in (kernels, others))
        assert found is not None
        assert before is not None
        assert "_d64_m32n32_s1_w4_g2_" in found.kernel.name
        assert found.microseconds < 0.9 * before.microseconds
    for case in suites.cases_of(["mission", "long"]):
        assert predict(kernels, row_of(case), H200) == predict(others, row_of(case), H200)


def test_floors() -> None:
    mission, causal = (row_of(case) for case in suites.mission())
    flops = 4 * 8 * 512 * 512 * 64
    assert L4.floor_us(mission) == pytest.approx(flops / 121e6, rel=1e-3)
    assert L4.floor_us(causal) == pytest.approx(flops * 513 / 1024 / 121e6, rel=1e-3)
    short = row_of(next(case for case in suites.long() if case.name == "long/b32_h32_s512_d64_causal"))
    elements = 4 * 32 * 32 * 512 * 64  # q, k, v and out
    assert L4.floor_us(short) == pytest.approx((2 * elements - 48 * 2**20) / 300e3, rel=1e-3)  # DRAM


def test_the_page_labels_every_figure_and_says_what_is_out_of_reach() -> None:
    text = (ROOT / "docs" / "predictions.md").read_text(encoding="utf-8")
    tables = [line for line in text.splitlines() if line.startswith("| batch |")]
    assert len(tables) == 2 * len(prediction_tables.ADA)
    for head in tables:
        columns = [cell.strip() for cell in head.strip("|").split("|")]
        times = [column for column in columns if column.endswith("µs")]
        assert all(column.startswith(("predicted", "floor")) for column in times)
    assert "**L4**: 5 µs is out of reach." in text
    assert re.search(r"\*\*RTX 4090\*\*, 128 SMs, predicted", text)
    assert "nothing on this page about them was measured" in " ".join(text.split())
