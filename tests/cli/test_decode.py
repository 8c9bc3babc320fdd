"""Suite `decode`: bottom_right causal masks through every provider on the host library, and its table."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

from sdpa_cutlass.cli import accuracy, decode_tables, measure, tables
from sdpa_cutlass.cli.inputs import random_qkv
from sdpa_cutlass.cli.measure import Settings
from sdpa_cutlass.cli.providers import ALL
from sdpa_cutlass.cli.results import Results, Row
from sdpa_cutlass.cli.suites import Case, decode
from sdpa_cutlass.cli.summary import compare
from sdpa_cutlass.problem import Causal
from tests.cli import rows as made

CPU = torch.device("cpu")
ONE = Case(suite="t", batch=2, num_heads_q=4, num_heads_kv=2, seqlen_q=1, seqlen_k=150, head_dim=64)
FOUR = dataclasses.replace(ONE, seqlen_q=4, causal=True, alignment=Causal.BOTTOM_RIGHT)
NAMES = ("fused", "piped", "torch_flash", "torch_math", "naive")


def measured(case: Case, *names: str) -> dict[str, Row]:
    settings = Settings(device=CPU, dtype="f16", providers=[ALL[name] for name in names], seed=0, repeats=1)
    return {row.provider: row for row in measure.measure(case, settings)}


@pytest.mark.parametrize("case", [ONE, FOUR], ids=["one query", "four queries"])
def test_every_provider_computes_it(case: Case) -> None:
    for name, row in measured(case, *NAMES).items():
        assert row.status == "ok", name
        assert (row.max_err_out or 1) < 1e-3
        assert (row.causal, row.alignment) == (case.causal, case.alignment.value)


def test_another_alignment_is_another_problem() -> None:
    qkv = random_qkv(FOUR, dtype=torch.float16, device=CPU, seed=0)
    offset = FOUR.problem().causal_offset
    reference = accuracy.make_reference(qkv, causal=True, seed=0, offset=offset)
    for wrong in (0, offset - 1, offset + 1):
        out = accuracy.naive_attention(qkv, causal=True, offset=wrong)
        assert reference.check(out, None).violation is not None
    right = accuracy.naive_attention(qkv, causal=True, offset=offset)
    assert reference.check(right, None, every_element=False).violation is None


def test_a_dtype_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(dataclasses.replace(ONE, dtype="bf16"), "fused")["fused"]
    assert (row.dtype, row.status) == ("bf16", "ok")
    assert "bf16" in str(row.kernel)


@pytest.mark.parametrize(("l2_bytes", "sets"), [(2**20, 7), (2**15, 2), (2**30, 20)])
def test_input_sets_of_a_cold_problem(monkeypatch: pytest.MonkeyPatch, l2_bytes: int, sets: int) -> None:
    """As many as four times the cache needs, at least two, at most one for each call of a graph."""
    made_sets: list[int] = []

    def operands(qkv: Any, conditions: Any) -> Any:
        made_sets.append(1)
        return qkv

    properties = types.SimpleNamespace(L2_cache_size=l2_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(measure, "random_qkv", lambda *arguments, **options: None)
    monkeypatch.setattr(measure, "make_conditions", lambda *arguments, **options: None)
    monkeypatch.setattr(measure, "_operands", operands)
    case = dataclasses.replace(ONE, suite="decode", seqlen_k=1200, batch=1)
    assert -(-4 * 2**20 // case.problem().bytes) == 7
    settings = Settings(device=torch.device("cuda"), dtype="f16", providers=[], seed=0, repeats=1)
    measure.input_sets(case, settings)
    assert len(made_sets) == sets


def rows() -> list[Row]:
    case = decode()[0]
    shape: dict[str, Any] = {"suite": "decode", "head_dim": 128, "num_heads_q": 32, "num_heads_kv": 8}
    shape |= {"seqlen_q": 1, "seqlen_k": 8192}
    kernel = "fmha_fwd_sm89_d128_m16n64_s2_w4_f16"
    assert case.problem().bytes == 33_570_816
    several = {"seqlen_q": 4, "causal": True, "alignment": "bottom_right"}
    return [
        made.row("fused", 10.0, kernel=kernel, max_err_out=1e-4, max_err_lse=1e-6, **shape),
        made.row("torch_flash", 20.0, **shape),
        made.row("torch_cudnn", 9.0, **shape),
        made.row("naive", None, status="out of memory", **shape),
        made.row("fused", 20.0, **shape | several),
        made.row("torch_flash", 30.0, **shape | several),
        made.row("fused", 12.0, **shape | {"dtype": "bf16"}),
    ]


TABLE = """\
| problem | fused kernel | fused µs | GB/s | of copy | flash µs | fused/flash | cudnn µs | fused/cudnn | naive µs \
| err O | err LSE |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|
| B1 H32/8 S1/8192 D128 | m16n64_s2_w4 | 10 | 3357 | 84 % | 20 | 2.00x | 9 | 0.90x | out of memory | 1.0e-04 | 1.0e-06 |
| B1 H32/8 S4/8192 D128 causal bottom_right | - | 20 | 1681 | 42 % | 30 | 1.50x | - | - | - | - | - |
| B1 H32/8 S1/8192 D128 bf16 | - | 12 | 2798 | 70 % | - | - | - | - | - | - | - |
"""  # noqa: E501


def test_table() -> None:
    found = Results({**made.ENV, "copy_bandwidth_gbps": 4000.0}, rows())
    text = tables.to_markdown(found)
    assert TABLE in text
    assert (
        "- decode: A copy reaches 4000 GB/s here; fused from 42 % of it (B1 H32/8 S4/8192 D128 causal "
        "bottom_right) to 84 % (B1 H32/8 S1/8192 D128).\n"
        "- decode: Against torch flash: faster on 2 of 2 problems, least 1.50x (B1 H32/8 S4/8192 D128 causal "
        "bottom_right).\n"
        "- decode: Against torch cudnn: faster on 0 of 1 problems, least 0.90x (B1 H32/8 S1/8192 D128).\n"
    ) in text
    assert "geometric mean" not in text  # which would mix decode with the others


def test_without_a_copy_there_is_no_share() -> None:
    (first, *_) = compare(rows())
    assert decode_tables.cells(first, {})[4] == "-"
    assert decode_tables.statements(compare(rows()), {})[0].startswith("Against torch flash")
