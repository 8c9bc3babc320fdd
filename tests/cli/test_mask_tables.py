"""The tables of the suites of masks, letter by letter, and how documents come by them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.documents.__main__ import main
from sdpa_cutlass.cli import mask_tables, plots, results, tables
from sdpa_cutlass.cli.summary import compare
from tests.cli import rows as made

TABLE = """\
**masks**, f16

| problem | seen | fused kernel | fused µs | TFLOP/s | plain µs | over plain | fused/efficient \
| fused/cudnn | fused/flash | err O | err LSE |
|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|
| B8 H32 S2048 D64 padding | 85 % | m128n64_s2_w4 | 105 | 2618 | 100 | +5 % | 3.00x | 1.20x | - | 1.5e-04 | \
5.0e-07 |

- torch_flash: refused, 1 of 1 problems: no masks

- padding (seqlen 2048 and more, geometric means of 1): +5 % over plain, at most +5 % (B8 H32 S2048 D64 \
padding); 3.00x efficient, least 3.00x; 1.20x cudnn, least 1.20x
"""


def test_markdown() -> None:
    heading, _, rest = tables.to_markdown(made.results(made.masked())).partition("\n\n")
    assert heading.startswith("NVIDIA H200")
    assert rest == TABLE


def test_a_kernel_of_a_larger_head_dim_is_told() -> None:
    rows = made.masked(head_dim=72)
    kernel = "fmha_fwd_sm89_d80_m64n64_s1_w4_f16_general"
    rows[0] = dataclasses.replace(rows[0], kernel=kernel)
    assert mask_tables.cells(compare(rows)[0])[2] == "d80 m64n64_s1_w4"
    rows[0] = dataclasses.replace(rows[0], kernel=None)
    assert mask_tables.cells(compare(rows)[0])[2] == "-"


def test_suites_keep_their_own_columns() -> None:
    text = tables.to_markdown(made.results(made.mission() + made.masked()))
    assert text.index("fused/piped |") < text.index("| over plain |")
    assert "fused against flash: geometric mean 2.00x over 1 problems" in text
    assert "- padding (seqlen 2048 and more" in text


def grid() -> list[results.Row]:
    """Two head dimensions of some kinds at two lengths, and grouped heads, which are plain."""
    rows: list[results.Row] = []
    for head_dim in (128, 64):
        for seqlen in (512, 2048):
            for kind in ({}, {"mask": "dense"}, {"mask": "none", "p_dropout": 0.1, "causal": True}):
                rows += made.masked(seqlen, head_dim=head_dim, **kind)
            grouped = made.masked(seqlen, head_dim=head_dim, mask="none", num_heads_kv=8)
            rows += [row for row in grouped if row.provider != "plain"]
    return rows


SUMMARY = """\
| seqlen 2048, head_dim 64 · 128 | over plain | over torch mem-efficient | over torch cuDNN \
| over torch flash |
|---|---:|---:|---:|---:|
| boolean [B, 1, 1, Sk] | +5 % · +5 % | 3.00 · 3.00 | 1.20 · 1.20 | - |
| boolean [B, 1, Sq, Sk], 90 % True | +5 % · +5 % | 3.00 · 3.00 | 1.20 · 1.20 | - |
| dropout 0.1, causal | +5 % · +5 % | 3.00 · 3.00 | 1.20 · 1.20 | - |
| grouped heads, 4 to 1 | - | 3.00 · 3.00 | 1.20 · 1.20 | - |"""


def test_summary() -> None:
    assert "\n".join(mask_tables.summary(compare(grid()))) == SUMMARY
    assert mask_tables.summary(compare(made.masked(512))) == []


def test_conclusions_are_about_long_problems_where_there_are_some() -> None:
    lines = mask_tables.conclusions(compare(grid()))
    assert [line.partition(" (")[0] for line in lines] == [
        "padding",
        "dense",
        "causal dropout",
        "grouped heads",
    ]
    assert all("means of 2)" in line for line in lines)
    assert "over plain" not in lines[-1]
    short = mask_tables.conclusions(compare(made.masked(512)))
    assert short[0].startswith("padding (geometric means of 1)")


def test_pictures_have_a_panel_for_each_kind() -> None:
    rows = [row for seqlen in (512, 2048, 8192) for row in made.masked(seqlen)]
    rows += [row for seqlen in (512, 2048, 8192) for row in made.masked(seqlen, mask="dense")]
    assert [panel.title for panel in plots.panels(compare(rows))] == [
        "masks: head_dim 64, dense",
        "masks: head_dim 64, padding",
    ]
    plots.figure(made.results(rows))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in miniature with blocks of both kinds, and the working directory."""
    blocks = {"README.md": ("summary", "masks_summary"), "docs/results.md": ("tables", "masks")}
    for name, sections in blocks.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(
            "".join(f"<!-- results: {section} -->\n<!-- end results -->\n" for section in sections)
        )
    results.save(made.results(), tmp_path / "plain.json")
    results.save(made.results(grid()), tmp_path / "masks.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_file_goes_where_its_suites_are_shown(folder: Path) -> None:
    assert main(["masks.json"]) == 0
    readme, long = (folder / "README.md").read_text(), (folder / "docs" / "results.md").read_text()
    assert readme.startswith("<!-- results: summary -->\n_No results yet")
    assert "<!-- results: masks_summary masks.json -->\n**f16** on NVIDIA H200" in readme
    assert SUMMARY in readme
    assert "<!-- results: masks ../masks.json -->\n## masks\n" in long
    assert main(["plain.json"]) == 0
    for text in ((folder / "README.md").read_text(), (folder / "docs" / "results.md").read_text()):
        assert text.count("No results yet") == 0
        assert text.count("plain.json -->") == text.count("masks.json -->") == 1
    assert main(["--check"]) == 0
    assert main(["plain.json", "masks.json", "--check"]) == 0


def test_one_file_may_hold_both(folder: Path) -> None:
    results.save(made.results(made.mission() + grid()), folder / "both.json")
    assert main(["both.json"]) == 0
    long = (folder / "docs" / "results.md").read_text()
    tables_block, masks_block = long.split("<!-- end results -->")[:2]
    assert ("**mission**" in tables_block, "**masks**" in tables_block) == (True, False)
    assert ("**mission**" in masks_block, "**masks**" in masks_block) == (False, True)
