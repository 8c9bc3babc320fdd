"""Nsight Compute: the call, its CSV in the form in which 2025.3 prints it, and the diagnosis."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from generator.families.fmha_fwd.config import MaskKind
from sdpa_cutlass.cli import OK, USAGE, main
from sdpa_cutlass.cli.profiling import child, command, diagnosis, ncu, view
from sdpa_cutlass.cli.profiling.problems import Task

KERNEL = "fmha_fwd_sm89_d64_m128n64_s2_w4_qreg_f16"
TASK = Task("8,32,2048,64", "f16", KERNEL)
MEASURED = (
    Path(__file__).resolve().parents[2] / "benchmarks/results/tuning/2026-11-21-h200-general-profile.json"
)
FIXED = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size",
         "Grid Size", "Device", "CC")  # fmt: skip
# A launch that nothing bounds, by our names; a test changes what it is about.
QUIET = {
    "duration_ns": 1030272, "sm_hz": 1.7e9, "sm_active_pct": 97, "sms": 132, "grid": 4096, "threads": 128,
    "registers": 243, "waves": 15.5, "occupancy_pct": 12.4, "issue_pct": 41.2, "tensor_pct": 56,
    "alu_pct": 20.6, "fma_pct": 15, "xu_pct": 35, "shared_pct": 48, "shared_wavefronts": 1_000_000,
    "conflicts_ldsm": 0, "conflicts_ld": 0, "conflicts_st": 10, "l2_bytes": 2123331616, "l2_pct": 20,
    "l2_hit_pct": 88,
    "dram_read_bytes": 2.0e8, "dram_write_bytes": 6e7, "dram_pct": 6,
    "stall_wait": 0.9, "stall_selected": 1.0, "stall_math_pipe_throttle": 0.7,
    "stall_long_scoreboard": 0.3, "stall_barrier": 0.2,
}  # fmt: skip


def csv(values: Mapping[str, float | str], kernel: str = KERNEL, launches: int = 1) -> str:
    """What ncu prints: chatter of both programs, names, units, launches; counters it lacks are n/a."""
    counters = {names[0]: values.get(ours, "n/a") for ours, names in ncu.COUNTERS.items()}
    return raw_csv(counters, kernel, launches)


def raw_csv(counters: Mapping[str, float | str], kernel: str, launches: int = 1) -> str:
    def line(cells: Sequence[object]) -> str:
        return ",".join(f'"{cell}"' for cell in cells)

    def number(value: float | str) -> str:
        return value if isinstance(value, str) else f"{value:,.2f}"

    first = ("", "4711", "python3", "127.0.0.1", kernel, "1", "7", "(128, 1, 1)", "(4096, 1, 1)", "0", "9.0")
    rows = [
        line([str(index), *first[1:], *(number(value) for value in counters.values())])
        for index in range(launches)
    ]
    return "\n".join(
        [
            "==PROF== Connected to process 4711 (/usr/bin/python3)",
            f'==PROF== Profiling "{kernel}": 0%....50%....100% - 14 passes',
            "a line of the profiled program",
            "==PROF== Disconnected from process 4711",
            line([*FIXED, *counters]),
            line(["" for _ in FIXED] + ["%" for _ in counters]),
            *rows,
        ]
    )


def counters_of(**changes: float) -> ncu.Counters:
    return ncu.parse(csv({**QUIET, **changes}), KERNEL)


# ---- the call ----


def test_command_line() -> None:
    arguments = ncu.command("/opt/ncu", TASK)
    assert arguments[0] == "/opt/ncu"
    wanted = arguments[arguments.index("--kernel-name") + 1].removeprefix("regex:")
    functions = {KERNEL + kind.suffix for kind in MaskKind} | {KERNEL + "_masked"}
    assert {
        name for name in (*functions, KERNEL + "_statistics", "x" + KERNEL) if re.search(wanted, name)
    } == functions
    assert arguments[arguments.index("--launch-skip") + 1] == "1"
    assert arguments[arguments.index("--launch-count") + 1] == "1"
    metrics = arguments[arguments.index("--metrics") + 1].split(",")
    assert (
        len(set(metrics)) == len(metrics) == len({name for names in ncu.COUNTERS.values() for name in names})
    )
    assert arguments[-3:-1] == ["-m", "sdpa_cutlass.cli.profiling.child"]
    assert Task.from_json(arguments[-1]) == TASK


def test_the_child_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = "import sdpa_cutlass.cli.profiling.child; print('found')"
    done = ncu.run_process([ncu.sys.executable, "-c", program])
    assert done.stdout == "found\n", done.stderr


def profile(stdout: str, stderr: str = "", status: int = 0) -> ncu.Counters:
    done = subprocess.CompletedProcess([], status, stdout, stderr)
    return ncu.profile("ncu", TASK, lambda arguments: done)


def test_a_profiled_launch() -> None:
    found = profile(csv(QUIET))
    assert (found.kernel, found.compute_capability) == (KERNEL, "9.0")
    assert found.get("duration_ns") == 1030272
    assert found.get("tensor_pct") == 56
    assert found.get("stall_drain") is None


def test_a_mask_has_a_function_of_its_own() -> None:
    assert profile(csv(QUIET, kernel=KERNEL + "_bias16")).kernel == KERNEL + "_bias16"


def test_the_second_name_of_a_counter_is_taken_where_the_first_is_not_known() -> None:
    names = ncu.COUNTERS["tensor_pct"]
    assert ncu.parse(raw_csv({names[0]: "n/a", names[1]: 33.0}, KERNEL), KERNEL).get("tensor_pct") == 33
    assert ncu.parse(raw_csv({names[1]: 33.0}, KERNEL), KERNEL).get("tensor_pct") == 33


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "", 1), "performance counters"),
        (
            ("==ERROR== Failed to prepare kernel for profiling\n", "", 9),
            "status 9: ==ERROR== Failed to prepare",
        ),
        (("", "torch.OutOfMemoryError: CUDA out of memory\n", 1), "out of memory"),
        (("==WARNING== No kernels were profiled.\n", "", 0), "saw no launch of .*No kernels"),
        ((csv(QUIET, kernel="another_kernel"), "", 0), "it profiled another_kernel"),
        ((csv(QUIET, kernel=KERNEL + "_causal"), "", 0), "it profiled .*_causal"),
        ((csv(QUIET, launches=2), "", 0), "one launch of"),
    ],
)
def test_what_goes_wrong_is_said(output: tuple[str, str, int], complaint: str) -> None:
    with pytest.raises(ncu.NcuError, match=complaint):
        profile(*output)


def test_an_ncu_that_cannot_be_run() -> None:
    def runner(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        raise PermissionError("not executable")

    with pytest.raises(ncu.NcuError, match="cannot be run: not executable"):
        ncu.profile("ncu", TASK, runner)


# ---- the diagnosis ----


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, "latency"),
        ({"tensor_pct": 88}, "tensor cores"),
        ({"xu_pct": 75, "tensor_pct": 70}, "exponentials (XU)"),
        ({"issue_pct": 82}, "instruction issue"),
        ({"shared_pct": 91}, "shared memory"),
        ({"l2_pct": 77}, "L2"),
        ({"dram_pct": 93}, "DRAM"),
        ({"sm_active_pct": 44, "grid": 64, "waves": 0.2, "duration_ns": 5200}, "too few CTAs"),
        ({"sm_active_pct": 44, "tensor_pct": 88}, "too few CTAs"),
    ],
)
def test_the_bound_is_named(changes: dict[str, float], bound: str) -> None:
    assert diagnosis.diagnose(counters_of(**changes)).bound == bound


def test_latency_is_explained_by_the_largest_stall() -> None:
    found = diagnosis.diagnose(counters_of(stall_long_scoreboard=5))
    assert found.hint == diagnosis.STALL_HINTS["long_scoreboard"]
    assert found.evidence[0] == "no unit is busy: the busiest is tensor cores with 56 %"
    assert "is long_scoreboard" in found.evidence[1]


def test_stalls_are_shares_of_all_warp_time_without_ready_warps() -> None:
    shares = diagnosis.stalls(counters_of())
    assert [reason for reason, _ in shares] == ["wait", "math_pipe_throttle", "long_scoreboard", "barrier"]
    assert shares[0][1] == pytest.approx(0.9 / 3.1)
    assert diagnosis.stalls(ncu.parse(csv({}), KERNEL)) == []


def test_bank_conflicts_change_the_hint() -> None:
    found = diagnosis.diagnose(counters_of(shared_pct=91, conflicts_ldsm=200_000))
    assert "bank conflicts" in found.evidence[-1]
    assert "swizzle" in found.hint


def test_idle_sms_with_enough_ctas_get_another_hint() -> None:
    few = diagnosis.diagnose(counters_of(sm_active_pct=44, grid=64))
    tail = diagnosis.diagnose(counters_of(sm_active_pct=44, grid=4096))
    assert "64 CTAs on 132 SMs" in few.evidence
    assert few.hint != tail.hint


def test_nothing_counted_is_no_crash() -> None:
    found = diagnosis.diagnose(ncu.parse(csv({}), KERNEL))
    assert found.bound == "latency"
    assert "no stall reasons" in found.hint


def test_counters_that_were_really_measured() -> None:
    """Those of committed profiles have the names that are asked for today, and give a diagnosis."""
    document = json.loads(MEASURED.read_text())
    assert document["kernels"]
    for row in document["kernels"]:
        raw = {name: metric["value"] for name, metric in row["metrics"].items()}
        found = ncu.parse(raw_csv(raw, row["kernel"]), row["kernel"])
        known = {name for name, value in found.values.items() if value is not None}
        assert {"duration_ns", "tensor_pct", "alu_pct", "issue_pct", "l2_bytes", "instructions",
                "stall_long_scoreboard"} <= known  # fmt: skip
        assert found.get("duration_ns") == float(row["metrics"]["gpu__time_duration.sum"]["value"])
        busiest = diagnosis.utilisations(found)[0]
        assert busiest[0].counter in ("tensor_pct", "alu_pct", "issue_pct")
        assert diagnosis.diagnose(found).evidence


# ---- the command ----


def test_the_command_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Sequence[str]] = []

    def runner(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        asked.append(arguments)
        return subprocess.CompletedProcess([], 0, csv({**QUIET, "tensor_pct": 88}, KERNEL + "_bool"), "")

    monkeypatch.setattr(command, "_missing", list)
    monkeypatch.setattr(ncu, "find", lambda: "/opt/ncu")
    monkeypatch.setattr(ncu.profile, "__defaults__", (runner,))
    monkeypatch.setattr(child, "choose", lambda task, device: KERNEL)
    monkeypatch.setattr("sdpa_cutlass.cli.environment.record", lambda device: {"gpu": "made up"})
    file = tmp_path / "profile.json"
    assert main(["profile", "--shape", "8,32,2048,64", "--json", str(file)]) == OK
    shown = capsys.readouterr().out
    assert "bound by  tensor cores" in shown
    assert shown.startswith(KERNEL + "_bool\n")
    assert len(shown.splitlines()) <= 30
    assert Task.from_json(asked[0][-1]) == TASK
    document = json.loads(file.read_text())
    assert document["diagnosis"]["bound"] == "tensor cores"
    assert document["counters"]["tensor_pct"] == 88
    assert document["task"]["kernel"] == KERNEL
    assert main(["profile", "--from", str(file)]) == OK
    assert capsys.readouterr().out == shown.replace(f"wrote {file}\n", "")


def test_a_folder_of_saved_launches_is_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, shape, dtype in (("a", "8,32,2048,64", "f16"), ("b", "8,32,2048,64,dense", "bf16")):
        counters = counters_of(tensor_pct=41 if name == "a" else 88)
        task = Task(shape, dtype, KERNEL)
        document = {
            "env": {"gpu": "made up"}, "task": dataclasses.asdict(task), "function": KERNEL,
            "compute_capability": "9.0", "counters": dict(counters.values),
        }  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    assert main(["profile", "--from", str(tmp_path)]) == OK
    gpu, _, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert gpu[:2] == ["made", "up;"]
    assert lines[0][:4] == ["8,32,2048,64", "m128n64_s2_w4_qreg", "1030.3", "15.50"]
    assert lines[0][4] == "41"
    assert lines[0][-1] == "latency"
    assert lines[1][:3] == ["8,32,2048,64,dense", "bf16", "m128n64_s2_w4_qreg"]
    assert lines[1][5] == "88"
    assert lines[1][-2:] == ["tensor", "cores"]


def test_a_folder_without_launches_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--from", str(tmp_path)]) == USAGE
    assert "no *.json in this folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"task": {}, "counters": {}, "env": {}}', '{"task": 3}', "[" * 200_000, "no file"],
    ids=lambda text: text[:10],
)
def test_a_file_that_is_no_saved_launch(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    if text != "no file":
        file.write_text(text)
    assert main(["profile", "--from", str(file)]) == USAGE
    assert f"--from {file}" in capsys.readouterr().err


def test_the_command_says_what_ncu_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.CompletedProcess([], 1, "==ERROR== ERR_NVGPUCTRPERM\n", "")
    monkeypatch.setattr(command, "_missing", list)
    monkeypatch.setattr(ncu, "find", lambda: "/opt/ncu")
    monkeypatch.setattr(ncu.profile, "__defaults__", (lambda arguments: done,))
    monkeypatch.setattr(child, "choose", lambda task, device: KERNEL)
    assert main(["profile", "--shape", "8,32,2048,64"]) == USAGE
    assert "NVreg_RestrictProfilingToAdminUsers" in capsys.readouterr().err


def test_a_screen_of_a_launch_with_everything_and_with_nothing() -> None:
    for counters in (counters_of(), ncu.parse(csv({}), KERNEL)):
        console = Console(width=150, record=True, file=io.StringIO())
        view.show_launch(console, "task", counters, diagnosis.diagnose(counters))
        text = console.export_text()
        assert "bound by" in text
        assert "None" not in text
