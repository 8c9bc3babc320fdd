"""The blocks of documents are made from result files, again and again the same, and checked."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.documents import short_tables
from benchmarks.documents.__main__ import main
from sdpa_cutlass.cli import results, suites
from sdpa_cutlass.cli.results import Results, Row
from sdpa_cutlass.cli.summary import compare
from tests.cli import rows as made

ROOT = Path(__file__).parents[2]
EMPTY = "<!-- results: {} -->\n<!-- end results -->\n"
FACTORS = {"fused": 1.0, "piped": 3.0, "torch_flash": 1.1, "torch_cudnn": 0.9, "naive": 6.0}


def full_grid() -> Results:
    """Every problem of the GPU's grid but the real ones; fused loses against cuDNN everywhere."""
    rows: list[Row] = []
    for number, case in enumerate(suites.cases_of(suites.DEFAULT_SUITES["cuda"])):
        shape = {
            name: getattr(case, name)
            for name in ("suite", "batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim")
        }
        kernel = f"fmha_fwd_sm89_d{case.head_dim}_m128n64_s2_w4_f16" + "_causal" * case.causal
        for provider, factor in FACTORS.items():
            ours = {"kernel": kernel} if provider == "fused" else {}
            time = (10.0 + number) * factor
            rows.append(made.row(provider, time, **shape, causal=case.causal, **ours))
    return made.results(rows)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in miniature, and the working directory."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        f"# Title\n\n{EMPTY.format('summary')}\nmiddle\n\n{EMPTY.format('plot')}end\n"
    )
    (tmp_path / "docs" / "results.md").write_text(EMPTY.format("tables"))
    results.save(full_grid(), tmp_path / "results" / "grid.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(*arguments: str) -> int:
    return main([*arguments])


TABLE = """\
| problem | fused | over piped | over torch flash | over best torch |
|---|---:|---:|---:|---:|
| batch 1, 8 heads of 64, seqlen 512 | 10 µs | 3.00 | 1.10 | 0.90 |
| batch 1, 8 heads of 64, seqlen 512, causal | 11 µs | 3.00 | 1.10 | 0.90 |
| batch 8 · 16 · 32, 8 heads of 64, seqlen 128 | 12 · 14 · 16 µs | 3.00 · 3.00 · 3.00 | 1.10 · 1.10 · 1.10 | 0.90 · 0.90 · 0.90 |
"""  # noqa: E501


def test_short_table() -> None:
    lines = short_tables.table(compare(full_grid().rows))
    assert lines[:5] == TABLE.splitlines()
    assert len(lines) == 2 + 2 + 2 * 3 + 2 * 5
    longest = "| head_dim 128, seqlen 512 · 2048 · 8192, causal | "
    assert lines[-1].startswith(longest)
    assert lines[-1].removeprefix(longest).split(" |")[0].endswith(" TFLOP/s")


def test_every_problem_of_the_grid_is_in_the_short_table() -> None:
    comparisons = compare(full_grid().rows)
    shown = [comparison for line in short_tables.series(comparisons) for comparison in line]
    assert len(shown) == len(comparisons) == 2 * (1 + 9 + 15)
    assert {id(comparison) for comparison in shown} == {id(comparison) for comparison in comparisons}


def test_statements() -> None:
    lines = short_tables.statements(compare(full_grid().rows))
    assert lines[0].startswith(
        "Against the piped CUTLASS baseline: faster on 50 of 50 problems, geometric mean 3.00x, from 3.00x (B"
    )
    assert "torch flash: faster on 50 of 50 problems, geometric mean 1.10x" in lines[1]
    assert "fastest torch backend of each problem: faster on 0 of 50 problems" in lines[2]
    assert "the naive chain: faster on 50 of 50" in lines[3]
    assert len(lines) == 4


def test_what_is_missing_shows() -> None:
    rows = [
        dataclasses.replace(row, gpu_us=None, tflops=None, status="wrong: NaN")
        if row.provider == "fused" and row.suite == "mission"
        else row
        for row in full_grid().rows
    ]
    text = short_tables.to_markdown(made.results(rows))
    assert "| batch 1, 8 heads of 64, seqlen 512 | – µs | – | – | – |" in text
    assert "faster on 48 of 48" in text
    assert "- fused: wrong, 2 of 50 problems: NaN" in text


@pytest.mark.parametrize(
    ("archs", "sentence"),
    [("89", True), ("80-real;89", True), ("89;90", False), ("90-virtual;89", True), ("90a", False)],
)
def test_ptx_is_owned_up_to(archs: str, sentence: bool) -> None:
    found = made.results()
    env = {**found.env, "library": {**found.env["library"], "archs": archs}}
    assert ("ran the PTX" in short_tables.through_ptx(Results(env, found.rows))) is sentence


def test_documents_are_filled_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report("results/grid.json", "--plot", "docs/img/grid.png") == 0
    readme, long = (folder / "README.md").read_text(), (folder / "docs" / "results.md").read_text()
    assert readme.startswith("# Title\n\n<!-- results: summary results/grid.json -->\n**f16** on NVIDIA H200")
    assert "\n<!-- results: plot results/grid.json docs/img/grid.png -->\n![Speed" in readme
    assert "](docs/img/grid.png)\n<!-- end results -->\nend\n" in readme
    assert long.startswith(
        "<!-- results: tables ../results/grid.json -->\n## grid\n\nNVIDIA H200, driver 580.0"
    )
    assert "| B2 H16 S8192 D128 causal | m128n64_s2_w4 |" in long
    picture = (folder / "docs" / "img" / "grid.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    capsys.readouterr()
    for arguments in ([], ["--check"], ["results/grid.json"], ["results/grid.json", "--check"]):
        assert report(*arguments) == 0
        assert "drawn" not in capsys.readouterr().out
        assert (folder / "README.md").read_text() == readme
        assert (folder / "docs" / "results.md").read_text() == long
        assert (folder / "docs" / "img" / "grid.png").read_bytes() == picture


def _typed_by_hand(folder: Path) -> None:
    readme = folder / "README.md"
    readme.write_text(readme.read_text().replace("3.00x", "4.00x", 1))


def _measured_again(folder: Path) -> None:
    results.save(made.results(made.mission()), folder / "results" / "grid.json")


def _picture_of_another_run(folder: Path) -> None:
    shutil.copy(folder / "other.png", folder / "grid.png")


@pytest.mark.parametrize("change", [_typed_by_hand, _measured_again, _picture_of_another_run])
def test_stale_documents_are_found_and_made_again(
    change: object, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results.save(made.results(), folder / "results" / "other.json")
    assert report("results/other.json", "--plot", "other.png") == 0
    assert report("results/grid.json", "--plot", "grid.png") == 0
    change(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert report("--check") == 1
    assert "stale; `python -m benchmarks.documents` makes it again" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert report() == 0
    assert report("--check") == 0


def test_the_first_file_has_the_table_and_all_have_statements(folder: Path) -> None:
    bf16 = [dataclasses.replace(row, dtype="bf16") for row in full_grid().rows]
    results.save(made.results(bf16), folder / "results" / "bf16.json")
    assert report("results/grid.json", "results/bf16.json") == 0
    text = (folder / "README.md").read_text()
    assert text.count("| problem |") == 1
    assert text.count("Against torch flash") == 2
    assert text.index("**f16** on") < text.index("| problem |") < text.index("**bf16** on")
    assert "](docs" not in text  # no picture was asked for
    long = (folder / "docs" / "results.md").read_text()
    assert re.findall("^## .*", long, re.MULTILINE) == ["## grid", "## bf16"]


def record(name: str, factor: float = 1.0, **env: object) -> Path:
    """A file as `bench` writes it: suites of every kind."""
    shape = {"suite": "decode", "seqlen_q": 1, "seqlen_k": 8192}
    rows = [
        *made.mission(),
        *made.long(64),
        *made.masked(),
        made.row("fused", 10.0 * factor, **shape),
        made.row("torch_flash", 30.0, **shape),
        made.row("naive", 90.0, **shape),
        made.row("plan_run", None, suite="wall", wall_us=4.0, wall_us_spread=0.2, loop_us=5.0),
        made.row("torch_default", None, suite="wall", wall_us=15.0, wall_us_spread=0.5, loop_us=15.1),
    ]
    path = Path("results", name)
    results.save(Results({**made.ENV, "copy_bandwidth_gbps": 4000.0, **env}, rows), path)
    return path


KINDS = ("summary", "naive_line", "tables", "decode", "wall", "naive", "agreement", "masks")


def test_every_kind_of_block(folder: Path) -> None:
    blocks = "".join(EMPTY.format(kind) for kind in (*KINDS, "plot_speedup", "plot_roofline"))
    (folder / "docs" / "results.md").write_text(blocks)
    record("a.json", gpu_uuid="GPU-1")
    record("b.json", 1.1, gpu_uuid="GPU-2")
    assert report("results/a.json", "results/b.json") == 0
    text = (folder / "docs" / "results.md").read_text()
    bodies = {
        kind: text.partition(f"<!-- results: {kind} ")[2].partition("<!-- end results -->")[0]
        for kind in (*KINDS, "plot_speedup", "plot_roofline")
    }
    assert "B1 H8 S1/8192 D64" not in bodies["summary"] + bodies["tables"] + bodies["masks"]
    assert "**9.00x**: B1 H8 S1/8192 D64" in bodies["naive_line"]
    assert "| decode | B1 H8 S1/8192 D64 | 90 | 10 | 9.00x | 8.18x |" in bodies["naive"]
    assert "A copy reaches 4000 GB/s" in bodies["decode"]
    assert "| B1 H8 S1/8192 D64 | - | 10 |" in bodies["decode"]
    assert "| `plan(...)` made before, `run(q, k, v, out)` | 4 | 0.2 | 5 |" in bodies["wall"]
    assert "**a** and **b**: two GPUs (by UUID)" in bodies["agreement"]
    assert "| fused | 6 | 0.0 % | 10.0 % | B1 H8 S1/8192 D64 |" in bodies["agreement"]
    assert "| plan_run | 1 | 0.0 % | 0.0 % |" in bodies["agreement"]
    assert "over plain" in bodies["masks"]
    for name in ("speedup", "roofline"):
        assert f"(img/a-{name}.png)" in bodies[f"plot_{name}"]
        assert (folder / "docs" / "img" / f"a-{name}.png").read_bytes().startswith(b"\x89PNG")
    assert report("--check") == 0
    assert report() == 0
    assert (folder / "docs" / "results.md").read_text() == text
    (folder / "docs" / "img" / "a-roofline.png").unlink()
    assert report("--check") == 1


def test_a_block_of_two_files_keeps_them_when_one_is_given(folder: Path) -> None:
    (folder / "docs" / "results.md").write_text(EMPTY.format("agreement"))
    record("a.json")
    record("b.json")
    record("c.json")
    assert report("results/a.json") == 0
    assert "No results yet" in (folder / "docs" / "results.md").read_text()
    assert report("results/a.json", "results/b.json") == 0
    before = (folder / "docs" / "results.md").read_text()
    assert report("results/c.json") == 0
    assert (folder / "docs" / "results.md").read_text() == before


def test_a_file_without_the_chain_is_not_named_for_it(folder: Path) -> None:
    (folder / "docs" / "results.md").write_text(EMPTY.format("naive"))
    results.save(made.results(made.masked()), folder / "results" / "masks.json")
    record("a.json")
    assert report("results/masks.json", "results/a.json") == 0
    assert "<!-- results: naive ../results/a.json -->" in (folder / "docs" / "results.md").read_text()


def square(name: str, suite: str, arch: str) -> Path:
    """A file of problems that the front page shows, full attention and causal at each length."""
    shape = {"suite": suite, "num_heads_q": 16, "num_heads_kv": 16, "head_dim": 128}
    rows = made.mission()
    for seqlen in (512, 1024, 2048, 16384):
        for causal in (False, True):
            problem = shape | {"batch": 16384 // seqlen, "seqlen_q": seqlen, "seqlen_k": seqlen}
            kernel = f"fmha_fwd_{arch}_d128_m128n128_s2_w12_f16" + "_causal" * causal
            rows.append(made.row("fused", seqlen / 4, causal=causal, **problem, kernel=kernel))
            rows.append(made.row("flash_attn_4", seqlen / 2, causal=causal, **problem))
    path = Path("results", name)
    results.save(made.results(rows), path)
    return path


def test_the_front_page(folder: Path) -> None:
    (folder / "README.md").write_text(EMPTY.format("front") + EMPTY.format("front_picture"))
    (folder / "docs" / "results.md").unlink()
    first, second = square("a.json", "hopper", "sm90"), square("b.json", "long", "sm89")
    assert report(str(first), str(second)) == 0
    lines = (folder / "README.md").read_text().splitlines()
    assert "| 8 | 16 | 2048 | 128 | yes | sm_90 | 512 | – | – | 1024 |" in lines
    assert not any(line.startswith("| 16 | 16 | 1024 ") for line in lines)
    cells = [cell for line in lines if line.startswith("| ") for cell in line.strip("|").split("|")]
    assert not any(len(cell.split()) > 1 for cell in cells if cell.strip()[0].isdigit())
    picture = folder / "docs" / "img" / "a-front_picture.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert report("--check") == 0
    square("b.json", "long", "sm90")  # the picture is of the second file, too
    assert report("--check") == 1
    text = (folder / "README.md").read_text()
    results.save(made.results(made.mission()), folder / "results" / "c.json")
    assert report("results/c.json") == 0
    assert "a-front_picture.png -->" in (folder / "README.md").read_text()
    assert "| 32 | 16 | 512 |" in text


def test_a_picture_that_cannot_be_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "docs" / "results.md").write_text(EMPTY.format("plot_roofline"))
    record("a.json", gpu="NVIDIA T4")
    assert report("results/a.json") == 2
    assert "results/a.json: nothing in it can be drawn as a-roofline.png" in capsys.readouterr().err


def test_nothing_is_written_unless_every_picture_can_be_drawn(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first picture can be drawn from the other file, the second cannot."""
    (folder / "docs" / "results.md").write_text(
        "<!-- results: plot img/a.png -->\n<!-- end results -->\n" + EMPTY.format("plot_roofline")
    )
    record("a.json")
    assert report("results/a.json") == 0
    documents = [folder / "README.md", folder / "docs" / "results.md", *(folder / "docs" / "img").iterdir()]
    assert len(documents) == 4
    before = [path.read_bytes() for path in documents]
    record("b.json", 1.1, gpu="NVIDIA T4")
    assert report("results/b.json") == 2
    assert "results/b.json: nothing in it can be drawn as a-roofline.png" in capsys.readouterr().err
    assert [path.read_bytes() for path in documents] == before


def test_documents_without_results_stay_so(folder: Path) -> None:
    assert report() == 0
    assert "No results yet" in (folder / "README.md").read_text()
    assert report("--check") == 0


def test_only_the_readme_is_needed(folder: Path) -> None:
    other = folder / "elsewhere" / "notes.md"
    other.parent.mkdir()
    other.write_text(EMPTY.format("summary"))
    before = (folder / "docs" / "results.md").read_text()
    assert report("results/grid.json", "--readme", "elsewhere/notes.md") == 0
    assert other.read_text().startswith("<!-- results: summary ../results/grid.json -->\n")
    assert (folder / "docs" / "results.md").read_text() == before


CPU = Results(made.ENV | {"gpu": None}, made.mission())
INTERRUPTED = Results(made.ENV | {"interrupted": True}, made.mission())
REFUSED: dict[str, tuple[str, Results | None, Sequence[str], str]] = {
    "cpu": ("", CPU, ["bad.json"], "bad.json was measured on a CPU"),
    "interrupted": ("", INTERRUPTED, ["bad.json"], "bad.json is of a run that was interrupted"),
    "no rows": ("", made.results([]), ["bad.json"], "bad.json has no rows"),
    "no file": ("", None, ["absent.json"], "cannot read absent.json: No such file"),
    "spaces": ("", None, ["a b.json"], "a name with spaces"),
    "another format": ("", None, ["README.md"], "README.md: not JSON"),
    "picture": ("", None, ["--plot", "picture.svg"], "must end in .png"),
    "no readme": ("", None, ["--readme", "absent.md"], "cannot read absent.md"),
    "no block": ("text\n", None, [], "README.md has no block"),
    "open block": ("<!-- results: summary -->\n", None, [], "README.md:1: the block is not closed"),
    "nested": (2 * "<!-- results: summary -->\n" + "<!-- end results -->\n", None, [], "not closed"),
    "only an end": ("a\n<!-- end results -->\n", None, [], "README.md:2: .* without a beginning"),
    "section": (EMPTY.format("other"), None, [], "section .other. is none of front, .*, agreement"),
}


@pytest.mark.parametrize(("readme", "found", "arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(
    readme: str,
    found: Results | None,
    arguments: Sequence[str],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if readme:
        (folder / "README.md").write_text(readme)
    if found is not None:
        results.save(found, folder / "bad.json")
    before = (folder / "README.md").read_text()
    assert report(*arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert (folder / "README.md").read_text() == before


def test_committed_documents_are_made_from_committed_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """README.md and the pages of results of this very checkout: no number in a block is typed by hand."""
    monkeypatch.chdir(ROOT)
    assert report("--check") == 0, capsys.readouterr().out
    if list((ROOT / "benchmarks" / "results").glob("*.json")):
        for name in ("README.md", "docs/performance.md"):
            assert "No results yet" not in (ROOT / name).read_text(), name
