"""compute-sanitizer's logs: what counts as clean, and that an exception excuses its own words only."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdpa_cutlass._locate import Target
from sdpa_cutlass.api import kernels
from sdpa_cutlass.registry import KernelInfo
from tests.gpu_report import sanitizer
from tests.gpu_report.problems import NUM_SPLITS

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at planted+0x90
=========     by thread (63,0,0) in block (0,0,0)
=========     Access to 0x7f1c00000100 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1c00000000 of size 256 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: main [0x1234]
=========
========= ERROR SUMMARY: 1 error
"""


def hazard(kernel: str, word: int, kind: str = "RAW", count: int = 1) -> str:
    return f"""========= COMPUTE-SANITIZER
========= Error: Potential {kind} hazard detected at __shared__ {word:#x} in block (0,0,0) :
=========     Write Thread (0,0,0) at {kernel}+0x87d0
=========     Read Thread (1,0,0) at {kernel}+0x8a70
=========     Current Value : 0
=========
========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)
"""


@pytest.fixture(scope="module")
def rows() -> dict[str, KernelInfo]:
    return {row.name: row for row in kernels(Target.HOST)}


@pytest.fixture(scope="module")
def grouped(rows: dict[str, KernelInfo]) -> KernelInfo:
    return next(row for row in rows.values() if row.kv_groups > 1 and not row.is_split)


def first_word(row: KernelInfo, group: int = 0) -> int:
    """Where row_max of a group lies: behind O's rows of head_dim + 8 floats."""
    return group * (row.smem_bytes // row.kv_groups) + 4 * row.block_m * (row.head_dim + 8)


def test_a_clean_log() -> None:
    assert sanitizer.parse(CLEAN) == sanitizer.Log(records=[], errors=0)


def test_a_report_is_read_whole() -> None:
    log = sanitizer.parse(OUT_OF_BOUNDS)
    assert log.errors == 1
    assert len(log.records) == 1
    assert "by thread (63,0,0)" in log.records[0].text
    assert log.records[0].kernel is None
    assert log.records[0].hazard is None


def test_a_log_that_ends_early_is_a_failure(rows: dict[str, KernelInfo]) -> None:
    for text in ("", "========= COMPUTE-SANITIZER\n", "Device not supported"):
        assert sanitizer.judge("memcheck", {"here": text}, rows).failures


def test_an_error_is_a_failure_and_shows_its_report(rows: dict[str, KernelInfo]) -> None:
    judged = sanitizer.judge("memcheck", {"one": CLEAN, "two": OUT_OF_BOUNDS}, rows)
    assert judged.errors == 1
    assert len(judged.failures) == 1
    assert judged.failures[0].startswith("two: Invalid __global__ write")


def test_an_error_without_a_report_is_a_failure(rows: dict[str, KernelInfo]) -> None:
    judged = sanitizer.judge("memcheck", {"here": CLEAN.replace("0 errors", "2 errors")}, rows)
    assert judged.failures


def test_the_known_words_are_excused_and_listed(rows: dict[str, KernelInfo], grouped: KernelInfo) -> None:
    last = 8 * grouped.block_m - 4
    for word in (
        first_word(grouped),
        first_word(grouped) + last,
        first_word(grouped, 1),
        first_word(grouped) + 1024,  # behind the system's KiB
    ):
        judged = sanitizer.judge("racecheck", {"here": hazard(grouped.name, word)}, rows)
        assert judged.failures == [], hex(word)
        assert judged.excused == {"merge_tile statistics": 1}
        assert judged.excused_kernels == {"merge_tile statistics": {grouped.name}}


def test_nothing_else_is_excused(rows: dict[str, KernelInfo], grouped: KernelInfo) -> None:
    word = first_word(grouped)
    single = next(row for row in rows.values() if row.kv_groups == 1 and row.smem_bytes > word)
    others = {
        "a word of O": ("racecheck", hazard(grouped.name, word - 4)),
        "a word behind them": ("racecheck", hazard(grouped.name, first_word(grouped, 1) - 1024 - 4)),
        "another kind": ("racecheck", hazard(grouped.name, word, "WAR")),
        "a kernel without groups": ("racecheck", hazard(single.name, word)),
        "an unknown kernel": ("racecheck", hazard("planted", word)),
        "another tool": ("memcheck", hazard(grouped.name, word)),
    }
    for what, (tool, text) in others.items():
        judged = sanitizer.judge(tool, {"here": text}, rows)
        assert len(judged.failures) == 1, what
        assert judged.excused == {}, what


def test_a_count_beyond_the_excused_reports_is_a_failure(
    rows: dict[str, KernelInfo], grouped: KernelInfo
) -> None:
    text = hazard(grouped.name, first_word(grouped), count=3)
    judged = sanitizer.judge("racecheck", {"here": text}, rows)
    assert judged.failures == ["here: the summary counts 3 errors, the log holds 1 reports"]


def test_the_excused_words_are_those_of_the_header(grouped: KernelInfo) -> None:
    """kMergeStride and the order of O, row_max, row_sum as the C++ has them."""
    root = Path(__file__).parents[2] / "templates/include/sdpa/fmha_fwd"
    traits = (root / "kernel_traits.cuh").read_text(encoding="utf-8")
    epilogue = (root / "epilogue.cuh").read_text(encoding="utf-8")
    assert "kMergeStride = kHeadDim + 8;" in traits
    assert "kSmemBytes = kQDirect ? kKvGroups * kGroupBytes" in traits
    assert "kMax = kBlockM * Traits::kMergeStride, kSum = kMax + kBlockM;" in epilogue
    words = _known("merge_tile statistics").words(grouped)
    assert len(words) == 2 * grouped.kv_groups
    assert all(len(part) == 8 * grouped.block_m for part in words)


def test_where_splits_meet_is_excused_in_split_kernels_only(
    rows: dict[str, KernelInfo], grouped: KernelInfo
) -> None:
    split = next(row for row in rows.values() if row.is_split)
    behind = 8 * split.block_m * NUM_SPLITS
    assert sanitizer.judge("racecheck", {"here": hazard(split.name, 1024)}, rows).failures == []
    for text in (hazard(split.name, 1024 + behind), hazard(grouped.name, 1024), hazard(split.name, 0, "WAR")):
        assert len(sanitizer.judge("racecheck", {"here": text}, rows).failures) == 1


def test_only_the_piped_softmax_may_read_what_nobody_has_written(rows: dict[str, KernelInfo]) -> None:
    def read(kernel: str) -> str:
        return (
            "========= Uninitialized __global__ memory read of size 16 bytes\n"
            f"=========     at void {kernel}(sdpa::unfused::SoftmaxParams)+0xc10\n"
            "=========     by thread (32,0,0) in block (0,0,0)\n"
            "=========\n========= ERROR SUMMARY: 1 error\n"
        )

    softmax = read("sdpa::unfused::unfused_softmax<float, (int)32, (int)1>")
    assert sanitizer.judge("initcheck", {"here": softmax}, rows).failures == []
    assert len(sanitizer.judge("memcheck", {"here": softmax}, rows).failures) == 1
    assert len(sanitizer.judge("initcheck", {"here": read("sdpa::unfused::gemm<float>")}, rows).failures) == 1


def _known(name: str) -> sanitizer.KnownHazard:
    return next(known for known in sanitizer.KNOWN if known.name == name)


def test_the_command_line_names_tool_and_log(tmp_path: Path) -> None:
    command = sanitizer.command("/bin/cs", "racecheck", tmp_path / "log", ["python", "-c", "1"])
    assert command[:3] == ["/bin/cs", "--tool", "racecheck"]
    assert command[command.index("--racecheck-report") + 1] == "hazard"
    assert command[command.index("--log-file") + 1] == str(tmp_path / "log")
    assert command[-3:] == ["python", "-c", "1"]
