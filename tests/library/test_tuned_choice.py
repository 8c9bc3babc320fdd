"""Choices follow tuned tables: where these are looked for, when they count, and what unfit ones do."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_cutlass import Causal, DType, Explanation, Family, Problem, explain, kernels, plan
from sdpa_cutlass.choice import select, tuned_lookup
from sdpa_cutlass.choice.tuned_lookup import TABLE_VARIABLE, file_stem, find, read, tables_for
from sdpa_cutlass.choice.tuned_table import MAX_BYTES, misfit, to_json
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import HOST
from sdpa_cutlass.library.locate import Target
from tests.library.tuned_tables import H200, PROBLEM, bucket, edited, forget, row, slowest, table

SHIPPED = sorted((Path(tuned_lookup.__file__).parents[1] / "tuned").glob("*.json"))


@pytest.fixture(autouse=True)
def _only_the_tables_of_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(TABLE_VARIABLE, raising=False)
    forget()
    yield
    forget()


def choice(problem: Problem = PROBLEM, **options: Any) -> Explanation:
    q = torch.zeros(
        problem.batch, problem.num_heads_q, problem.seqlen_q, problem.head_dim, dtype=torch.float16
    )
    k = torch.zeros(problem.batch, problem.num_heads_kv, problem.seqlen_k, problem.head_dim, dtype=q.dtype)
    return explain(q, k, k.clone(), causal=problem.causal, **options)


def use(monkeypatch: pytest.MonkeyPatch, path: Path, text: str | None = None) -> None:
    if text is not None:
        path.write_text(text, encoding="utf-8")
    monkeypatch.setenv(TABLE_VARIABLE, str(path))
    forget()


def test_a_row_decides_where_the_cost_model_would_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = slowest().name
    assert choice().choice.kernel.name != name
    assert choice().choice.reason == "cost model"
    use(monkeypatch, tmp_path / "mine.json", to_json(table()))
    found = choice().choice
    assert found.kernel.name == name
    assert found.reason == f"tuned table mine.json: 5.12 µs at {bucket()}"
    near = choice(dataclasses.replace(PROBLEM, seqlen_k=160)).choice
    assert near.kernel.name == name
    assert "0.32 octaves from here" in near.reason
    assert choice(dataclasses.replace(PROBLEM, seqlen_k=1024)).choice.reason == "cost model"
    assert choice(dataclasses.replace(PROBLEM, causal=Causal.TOP_LEFT)).choice.reason == "cost model"
    assert choice(family=Family.UNFUSED).choice.reason == "cost model"
    other = select.ranking(library(Target.HOST), PROBLEM, Family.FMHA_FWD, HOST)[0][0]
    assert choice(kernel=other.name).choice.kernel is other


def test_the_tuned_kernel_runs_and_is_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path / "mine.json", to_json(table()))
    q, k, v = torch.randn(3, 1, 2, 128, 64, dtype=torch.float16).unbind()
    made = plan(q, k, v)
    assert made.kernel.name == slowest().name
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    out = torch.empty_like(q)
    made.run(q, k, v, out)
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("everything", [False, True], ids=["one kernel", "all kernels"])
def test_a_forced_choice_asks_no_table(
    everything: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = select.ranking(library(Target.HOST), PROBLEM, Family.FMHA_FWD, HOST)[0][0]
    use(monkeypatch, tmp_path / "mine.json", to_json(table()))
    monkeypatch.setenv(select.FORCE_VARIABLE, "*" if everything else other.name)
    select.forced_pattern.cache_clear()
    try:
        assert choice().choice.kernel is other
    finally:
        monkeypatch.delenv(select.FORCE_VARIABLE)
        select.forced_pattern.cache_clear()


def test_a_table_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    use(monkeypatch, path, to_json(table()))
    assert choice().choice.kernel.name == slowest().name
    path.unlink()
    assert choice(dataclasses.replace(PROBLEM, seqlen_k=130)).choice.kernel.name == slowest().name


def other_dtype() -> str:
    rows = [k for k in kernels(Target.HOST) if k.serves(Family.FMHA_FWD) and k.head_dim == 64]
    return next(k.name for k in rows if k.dtype is DType.BF16)


UNFIT = {
    "malformed": (lambda: "{}", "the table has no compute_capability"),
    "unknown kernel": (
        lambda: to_json(table(row(kernel="fmha_fwd_sm89_d64_m16n16_s1_w1_f16"))),
        "the library has no kernel fmha_fwd_sm89_d64_m16n16_s1_w1_f16",
    ),
    "capability": (lambda: to_json(table(compute_capability=(9, 0))), "(9.0, 58 SMs), and this is host"),
    "SMs": (lambda: to_json(table(sms=60)), "(8.9, 60 SMs), and this is host"),
    "several splits": (lambda: edited(num_splits=2), "row 0: num_splits is 2; a row names no number"),
    "another dtype": (lambda: to_json(table(row(kernel=other_dtype()))), "is for bf16, but is named"),
    "plain kernel for a mask": (
        lambda: to_json(
            table(
                row(
                    bucket=dataclasses.replace(bucket(), kind="bool"),
                    kernel=next(
                        k.name
                        for k in kernels(Target.HOST)
                        if k.dtype is DType.F16 and k.head_dim == 64 and not k.is_general
                        if k.family is Family.FMHA_FWD
                    ),
                )
            )
        ),
        "is a plain kernel, but is named for f16 d64 bool",
    ),
    "unbiased kernel for a bias": (
        lambda: to_json(
            table(
                row(
                    bucket=dataclasses.replace(bucket(), head_dim=96, kind="bias16"),
                    kernel=next(
                        k.name for k in kernels(Target.HOST) if k.is_unbiased and k.dtype is DType.F16
                    ),
                )
            )
        ),
        "takes no bias, but is named for f16 d96 bias16",
    ),
    "piped kernel": (
        lambda: to_json(
            table(row(kernel=next(k.name for k in kernels(Target.HOST) if k.family is Family.UNFUSED)))
        ),
        "is no fused kernel",
    ),
    "too large": (lambda: " " * (MAX_BYTES + 1), f"larger than {MAX_BYTES} bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_an_unfit_table_warns_once_and_the_cost_model_chooses(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, message = UNFIT[name]
    path = tmp_path / "bad.json"
    usual = choice().choice
    use(monkeypatch, path, made())
    with pytest.warns(UserWarning, match="is not used, so kernels are chosen without it") as caught:
        found = choice().choice
    assert len(caught) == 1
    assert f"{TABLE_VARIABLE}={path}" in str(caught[0].message)
    assert message in str(caught[0].message)
    assert (found.kernel, found.reason) == (usual.kernel, "cost model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice(dataclasses.replace(PROBLEM, seqlen_k=96))


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "relative", "unreadable text"])
def test_what_is_no_file_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "it"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # opening one for reading waits for a writer
    elif kind == "unreadable text":
        path.write_bytes(b"\xff\xfe")
    use(monkeypatch, Path("it") if kind == "relative" else path)
    expected = {
        "missing": "there is no such file",
        "folder": "not a regular file",
        "pipe": "not a regular file",
        "relative": "not an absolute path",
        "unreadable text": "cannot be read: 'utf-8'",
    }
    with pytest.warns(UserWarning, match=expected[kind]):
        assert choice().choice.reason == "cost model"


def test_the_variable_can_turn_tables_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tuned_lookup.default_paths(H200)[0]
    own.parent.mkdir(parents=True)
    own.write_text(to_json(table(device=H200)))
    assert tables_for(library(Target.HOST), H200) is not None
    forget()
    monkeypatch.setenv(TABLE_VARIABLE, "off")
    assert tables_for(library(Target.HOST), H200) is None


def test_a_gpus_table_says_nothing_about_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path / "h200.json", to_json(table(device=H200)))
    assert choice().choice.reason == "cost model"  # and no warning, which would be an error here
    assert tables_for(library(Target.HOST), H200) is not None


def test_the_users_own_table_comes_before_the_shipped_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own, shipped = tuned_lookup.default_paths(H200)
    assert own == tmp_path / "cache" / "sdpa_cutlass" / "tuned" / "nvidia_h200.json"
    assert shipped.parent.name == "tuned"
    assert (shipped.parent / "README.md").is_file()
    shipped = tmp_path / "shipped.json"
    monkeypatch.setattr(tuned_lookup, "default_paths", lambda device: [own, shipped])
    native = library(Target.HOST)
    assert tables_for(native, H200) is None
    forget()
    shipped.write_text(to_json(table(device=H200)))
    assert getattr(tables_for(native, H200), "path", None) == shipped
    forget()
    own.parent.mkdir(parents=True)
    own.write_text(to_json(table(device=H200)))
    assert getattr(tables_for(native, H200), "path", None) == own
    own.write_text("no table")
    complaints: list[str] = []
    found = find(native, H200, complaints)
    assert getattr(found, "path", None) == shipped
    assert len(complaints) == 1
    assert str(own) in complaints[0]


def test_without_a_home_there_is_still_the_shipped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/folder")
    assert len(tuned_lookup.default_paths(H200)) == 1
    assert tuned_lookup.default_paths(HOST) == []


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("NVIDIA H200", "nvidia_h200"),
        ("NVIDIA GeForce RTX 4090", "nvidia_geforce_rtx_4090"),
        ("../x", "x"),
        ("NVIDIA H100 MIG 1g.10gb", "nvidia_h100_mig_1g_10gb"),
    ],
)
def test_file_names_are_plain(name: str, stem: str) -> None:
    assert file_stem(name) == stem


def test_importing_reads_no_table_and_not_even_the_code_for_it() -> None:
    code = (
        "import sys, sdpa_cutlass; "
        "print([name for name in sys.modules if name.startswith('sdpa_cutlass.tuned')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_shipped_tables_are_valid() -> None:
    for path in SHIPPED:
        found = read(path)
        assert found is not None
        assert path.stem == file_stem(found.gpu)
        assert misfit(found, kernels(Target.HOST), None) is None, path
