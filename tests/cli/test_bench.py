"""The bench command: a record of the host suites for real, what a GPU adds on a made-up one, refusals."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.documents.report import SECTIONS
from sdpa_cutlass.cli import bench, main, make_parser, results, suites, wall
from sdpa_cutlass.cli.bench_arguments import ALL, SUITES
from sdpa_cutlass.cli.measure import measure
from sdpa_cutlass.cli.providers import Provider
from sdpa_cutlass.cli.results import PEERS, PROVIDERS, ROW_KEYS, Row
from sdpa_cutlass.cli.roofline import Ceilings
from tests.cli import rows as made

CASE = "host/b1_h2_s160_d32"


def run(folder: Path, *arguments: str, providers: str = "fused,naive") -> int:
    command = ["bench", "--device", "cpu", "--filter", CASE, "--providers", providers, "--repeats", "1"]
    return main([*command, "--out", str(folder), *arguments])


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", "--filter", CASE, "--out", str(tmp_path / "new")]) == 0
    output = capsys.readouterr().out
    assert "times and ratios on a CPU mean nothing" in " ".join(output.split())
    (csv_name, json_name) = files(tmp_path / "new")
    found = results.load(tmp_path / "new" / json_name)
    assert json_name == f"{found.env['date'][:10]}-cpu-f16-host.json"
    assert csv_name == json_name.replace(".json", ".csv")
    assert {row.provider for row in found.rows} == {*PROVIDERS} - {"plain"}
    assert {row.status for row in found.rows if row.provider in ("fused", "piped", "naive")} == {"ok"}
    assert found.env["interrupted"] is False
    assert found.env["command"]["name"] == "bench"
    assert found.env["command"]["suites"] == ["host"]
    assert set(found.env["peers"]) == {*PEERS}
    for name, about in found.env["peers"].items():
        assert f"{name}: {about}" in output
    assert found.env["copy_bandwidth_gbps"] is None
    for row in found.rows:
        assert row.gpu_us is row.floor_us is row.loop_us is None
    lines = list(csv.DictReader((tmp_path / "new" / csv_name).read_text().splitlines()))
    assert [line["provider"] for line in lines] == [row.provider for row in found.rows]
    del found.env["command"]["filter"]  # which names problems: `host/...`
    assert not [value for value in found.env.values() if "/" in str(value)]  # no paths


def test_no_file_is_replaced(tmp_path: Path) -> None:
    for _ in range(3):
        assert run(tmp_path, "--quiet") == 0
    names = [name for name in files(tmp_path) if name.endswith(".json")]
    stem = sorted(names, key=len)[0].removesuffix(".json")
    assert sorted(names) == sorted([f"{stem}.json", f"{stem}-2.json", f"{stem}-3.json"])


def test_a_killed_run_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies on the disk after every problem is a whole file, which says that it is not finished."""
    seen: list[results.Results] = []

    def looked(case: Any, settings: Any) -> list[Row]:
        seen.extend(results.load(path) for path in tmp_path.glob("*.json"))
        if len(seen) == 3:
            raise SystemExit(9)  # as good as killed: nothing after it runs
        return measure(case, settings)

    monkeypatch.setattr("sdpa_cutlass.cli.measure.measure", looked)
    with pytest.raises(SystemExit):
        run(tmp_path, "--filter", "host/*")
    found = results.load(next(tmp_path.glob("*.json")))
    assert [len(one.rows) for one in seen] == [0, 2, 4]
    assert found == seen[2]
    assert found.env["interrupted"] is True


def test_an_interrupt_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def interrupted(*arguments: Any) -> list[Row]:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr("sdpa_cutlass.cli.measure.measure", interrupted)
    assert run(tmp_path, "--filter", "host/*") == 0
    assert "interrupted after 2 rows" in capsys.readouterr().out
    found = results.load(next(tmp_path.glob("*.json")))
    assert (len(found.rows), found.env["interrupted"]) == (2, True)


BAD = {
    "wrong": (made.row("fused", None, status="wrong: NaN"), "1 of 1 rows of this library are wrong"),
    "impossible": (
        made.row("torch_flash", 0.1, status="invalid: 0.1 us, below the hardware's floor of 0.5 us"),
        "impossible: mission, torch_flash: invalid: 0.1 us",
    ),
    "a wrong call": (made.row("plan_run", None, suite="wall", status="wrong: NaN"), "wrong or failed"),
}


@pytest.mark.parametrize(("row", "text"), BAD.values(), ids=BAD.keys())
def test_what_must_not_pass(
    row: Row,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sdpa_cutlass.cli.measure.measure", lambda *arguments: [row])
    assert run(tmp_path) == 1
    assert text in capsys.readouterr().out
    assert results.load(next(tmp_path.glob("*.json"))).rows == [row]


@pytest.mark.parametrize(
    ("before_us", "status", "text"),
    [
        (10.0, 0, "regressions: 0"),
        (20.0, 0, "0.500  faster"),
        (9.0, 1, "mission, B1 H8 S512 D64, f16, fused: slower"),
    ],
)
def test_against_an_earlier_file(
    before_us: float,
    status: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run is recorded as always, then compared: what became slower decides the exit status."""
    earlier = tmp_path / "earlier.json"
    results.save(results.Results(made.ENV, [made.row("fused", before_us, gpu_us_spread=0.1)]), earlier)
    row = made.row("fused", 10.0, gpu_us_spread=0.1)
    monkeypatch.setattr("sdpa_cutlass.cli.measure.measure", lambda *arguments: [row])
    assert run(tmp_path / "new", "--against", str(earlier)) == status
    output = capsys.readouterr().out
    assert text in output
    assert "gpu differs: NVIDIA H200 → None" in output
    assert results.load(next((tmp_path / "new").glob("*.json"))).rows == [row]


def test_a_wrong_row_fails_although_it_is_no_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = tmp_path / "earlier.json"
    results.save(results.Results(made.ENV, [made.row("fused", 10.0), made.row("piped", 10.0)]), earlier)
    rows = [made.row("fused", None, status="wrong: NaN"), made.row("piped", 10.0)]
    monkeypatch.setattr("sdpa_cutlass.cli.measure.measure", lambda *arguments: rows)
    assert run(tmp_path / "new", "--against", str(earlier)) == 1


def test_against_what_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is none is found before anything is measured; one of other problems after."""
    assert run(tmp_path / "new", "--against", str(tmp_path / "missing.json")) == 2
    assert "missing.json" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    earlier = tmp_path / "earlier.json"
    results.save(results.Results(made.ENV, [made.row("fused", 10.0, batch=7)]), earlier)
    monkeypatch.setattr("sdpa_cutlass.cli.measure.measure", lambda *arguments: [made.row("fused")])
    assert run(tmp_path / "new", "--against", str(earlier)) == 2
    assert "share no problem" in capsys.readouterr().err
    assert list((tmp_path / "new").glob("*.json"))


def fake_gpu(monkeypatch: pytest.MonkeyPatch, measured: list[tuple[str, Any]]) -> None:
    """A GPU as far as the command goes: problems are noted, not measured."""
    env = made.ENV | {"gpu": "NVIDIA GeForce RTX 4090", "gpu_uuid": "GPU-1", "l2_bytes": 72 * 2**20}

    def noted(case: Any, settings: Any) -> list[Row]:
        measured.append((case.name, settings))
        shape = {
            name: getattr(case, name)
            for name in ("suite", "batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim")
        }
        shape |= {"causal": case.causal, "alignment": case.alignment.value, "mask": case.mask}
        shape |= {"dtype": case.dtype or settings.dtype, "p_dropout": case.p_dropout}
        return [made.row(name, time, **shape) for name, time in (("fused", 10.0), ("torch_flash", 12.0))]

    def noted_wall(case: Any, dtype: str, device: Any, *, seed: int) -> list[Row]:
        measured.append((case.name, None))
        return [made.row("plan_run", None, suite="wall", wall_us=4.0, wall_us_spread=0.1, loop_us=5.0)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr("sdpa_cutlass.cli.running.library", lambda target: None)
    monkeypatch.setattr("sdpa_cutlass.cli.environment.record", lambda device: dict(env))
    monkeypatch.setattr("sdpa_cutlass.cli.environment.close", lambda env, device: None)
    monkeypatch.setattr("sdpa_cutlass.cli.roofline.copy_bandwidth_gbps", lambda device: 900.0)
    monkeypatch.setattr("sdpa_cutlass.cli.measure.measure", noted)
    monkeypatch.setattr("sdpa_cutlass.cli.wall.measure", noted_wall)


def test_everything_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default: every problem of every GPU suite, once, with all providers and pictures."""
    peer = Provider(name="flash_attn", bind=lambda case, operands: lambda: torch.zeros(1))
    about = dict.fromkeys(PEERS, "not installed") | {"flash_attn": "2.8.3"}
    monkeypatch.setattr("sdpa_cutlass.cli.peers.find", lambda: ({"flash_attn": peer}, about))
    measured: list[tuple[str, Any]] = []
    fake_gpu(monkeypatch, measured)
    assert main(["bench", "--out", str(tmp_path)]) == 0
    names = [name for name, _ in measured]
    assert len(names) == len(set(names)) == 2 + 18 + 30 + 1 + 22 + 133 + 2
    assert [name for name in names if name.startswith("wall/")] == [
        "wall/b1_h8_s512_d64",
        "wall/b1_h8_s512_d64_causal",
    ]
    settings = measured[0][1]
    assert [provider.name for provider in settings.providers] == [*PROVIDERS, "flash_attn"]
    assert isinstance(settings.ceilings, Ceilings)
    assert settings.loops == bench.LOOPS
    stem = "2026-11-21-rtx-4090-f16-all"
    assert files(tmp_path) == [
        f"{stem}{suffix}" for suffix in ("-roofline.png", "-speed.png", "-speedup.png", ".csv", ".json")
    ]
    env = results.load(tmp_path / f"{stem}.json").env
    assert env["roofline"]["dram_gbps"] == 1008
    assert (env["copy_bandwidth_gbps"], env["gpu_uuid"]) == (900.0, "GPU-1")
    assert env["peers"]["flash_attn"] == "2.8.3"
    assert "of copy" in " ".join(capsys.readouterr().out.split())


def test_a_dtype_of_its_own_is_not_measured_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[tuple[str, Any]] = []
    fake_gpu(monkeypatch, measured)
    for dtype in ("f16", "bf16"):
        assert main(["bench", "--suite", "decode", "--dtype", dtype, "--out", str(tmp_path), "--quiet"]) == 0
    names = [name for name, _ in measured]
    assert len(names) == 22 + 21
    assert sum(name.endswith("_bf16") for name in names) == 1
    assert "2026-11-21-rtx-4090-bf16-decode.json" in files(tmp_path)


@pytest.mark.parametrize(
    ("kind", "wanted", "found"),
    [
        ("cuda", None, suites.GPU_SUITES),
        ("cuda", ("decode", ALL), ("decode", "mission", "small", "long", "real", "masks")),
        ("cuda", ("host", "small"), ("host", "small")),
        ("cpu", None, ("host",)),
        ("cpu", ("host_masks", "real"), ("host_masks", "real")),
    ],
)
def test_suites(kind: str, wanted: tuple[str, ...] | None, found: tuple[str, ...]) -> None:
    assert bench.suite_names(wanted, torch.device(kind)) == found


def test_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["bench", "--device", "cpu", "--list"]) == 0
    assert len(capsys.readouterr().out.split()) == 11
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["bench", "--suite", "mission", "--list"]) == 0
    assert capsys.readouterr().out.split() == [case.name for case in (*suites.mission(), *wall.cases())]
    assert main(["bench", "--filter", "wall/*causal", "--list"]) == 0
    assert capsys.readouterr().out.split() == ["wall/b1_h8_s512_d64_causal"]


def test_list_of_what_needs_a_gpu_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    for suite in ("masks,mission", "all"):
        assert main(["bench", "--device", "cpu", "--suite", suite, "--list"]) == 0
        assert "masks/b8_h32_s2048_d64_dense" in capsys.readouterr().out.split()
    assert main(["bench", "--device", "cpu", "--suite", "masks"]) == 2


def test_a_reader_that_has_seen_enough() -> None:
    command = [sys.executable, "-m", "sdpa_cutlass", "bench", "--device", "cpu", "--list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert bench.folder(cpu) == bench.folder(cuda) == Path("bench-results")
    Path("benchmarks", "results").mkdir(parents=True)
    assert bench.folder(cuda) == Path("benchmarks", "results")
    assert bench.folder(cpu) == Path("build", "bench")


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA L4", "l4"), ("", "unknown")],
)
def test_slugs(name: str, slug: str) -> None:
    assert bench.slug(name) == slug


REFUSED = {
    "a GPU's suite": (["--suite", "host,long,decode"], "--suite long,decode: needs a GPU"),
    "all": (["--suite", ALL], "--suite all: needs a GPU"),
    "filter": (["--filter", "nothing"], "--list shows their names"),
    "an absent peer": (["--providers", "fused,xformers"], "--providers xformers: not installed"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    about = dict.fromkeys(PEERS, "not installed")
    monkeypatch.setattr("sdpa_cutlass.cli.peers.find", lambda: ({}, about))
    out = tmp_path / "out"
    assert main(["bench", "--device", "cpu", "--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


USAGE = {
    "suite": (["--suite", "nonsense"], f"nonsense is not among {', '.join(SUITES)}"),
    "no suite": (["--suite", ","], "nothing is not among"),
    "provider": (["--providers", "me"], "me is not among fused"),
    "repeats": (["--repeats", "0"], "must be at least 1"),
}


@pytest.mark.parametrize(("arguments", "message"), USAGE.values(), ids=USAGE.keys())
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["bench", *arguments])
    assert raised.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_unwritable_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows before anything is measured."""
    (tmp_path / "blocker").write_text("")
    monkeypatch.setattr("sdpa_cutlass.cli.measure.measure", lambda *arguments: pytest.fail("measured"))
    assert run(tmp_path / "blocker" / "out") == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_peer_that_computes_something_else_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held to no bound of ours, but its time must not stand beside ours."""

    def bind(case: Any, operands: Any) -> Any:
        return lambda: operands.qkv.v.clone()

    liar = types.SimpleNamespace(find=lambda: ({"xformers": Provider(name="xformers", bind=bind)}, {}))
    monkeypatch.setattr(bench, "peers", liar)
    assert run(tmp_path, providers="naive,xformers") == 0
    found = {row.provider: row for row in results.load(next(tmp_path.glob("*.json"))).rows}
    assert found["xformers"].status.endswith("not this problem's answer")
    assert found["xformers"].wall_us is None
    assert found["naive"].status == "ok"


def test_the_document_names_what_there_is() -> None:
    """docs/benchmarks.md: its commands parse, and it has every peer, suite and section."""
    root = Path(__file__).parents[2]
    text = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(?:\$ )?python -m sdpa_cutlass (.*)$", text, re.MULTILINE)
    assert len(commands) > 6
    for command in commands:
        make_parser().parse_args(shlex.split(command, comments=True))
    for name in (*PEERS, *PROVIDERS, *SECTIONS, "plan_run", "plan_make", "torch_default"):
        assert f"`{name}`" in text, name
    suites_table = (root / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for name in suites.SUITE_NAMES:
        assert f"\n| `{name}` | " in suites_table, name
    for key in ROW_KEYS:
        assert f"`{key}`" in suites_table, key


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    filters = ["--filter", "mission/*", "--filter", "wall/*", "--filter", "decode/b1_h16_q*_k8192_d64*"]
    assert main(["bench", *filters, "--out", str(tmp_path)]) == 0
    path = next(tmp_path.glob("*.json"))
    found = results.load(path)
    assert json.loads(path.read_text())["env"]["gpu_uuid"].startswith("GPU-")
    assert found.env["copy_bandwidth_gbps"] > 100
    rows = {(row.suite, row.seqlen_q, row.causal, row.provider): row for row in found.rows}
    for causal in (False, True):
        assert rows["mission", 512, causal, "fused"].status == "ok"
        assert (rows["mission", 512, causal, "fused"].loop_us or 0) > 1
        assert rows["wall", 512, causal, "plan_run"].status == "ok"
        assert (rows["wall", 512, causal, "plan_run"].wall_us or 0) > 0.5
    for queries in (1, 4, 16):
        for provider in ("fused", "torch_flash", "naive"):
            row = rows["decode", queries, queries > 1, provider]
            assert row.status == "ok"
            assert (row.gpu_us or 0) > (row.floor_us or 0)
            assert (row.input_sets or 0) > 1
