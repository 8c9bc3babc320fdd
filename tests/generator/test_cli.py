"""`python -m generator`: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from generator import __main__ as cli
from generator.core.family import Families
from generator.core.space import IllegalTileError, Space
from generator.families import FAMILIES

ROOT = Path(cli.__file__).parent.parent
KERNEL = "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_causal"


def _run(*arguments: str) -> int:
    return cli.main(arguments)


def test_generates_and_then_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert _run("--space", "smoke", "--out", str(out)) == 0
    assert "wrote" in capsys.readouterr().out
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert _run("--space", "smoke", "--out", str(out)) == 0
    assert "up to date, nothing written" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == stamps


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    request = ("--space", "smoke", "--out", str(out))
    assert _run(*request, "--check") == 1
    assert not out.exists()
    assert "missing: registry.cpp" in capsys.readouterr().out
    _run(*request)
    assert _run(*request, "--check") == 0
    unit = next((out / "units").iterdir())
    unit.write_text("edited")
    capsys.readouterr()
    assert _run(*request, "--check") == 1
    assert capsys.readouterr().out.splitlines()[1:] == [f"  differs: units/{unit.name}"]
    assert unit.read_text() == "edited"
    assert _run("--space", "release", "--out", str(out), "--check") == 1


def test_a_smaller_space_deletes_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run("--space", "release", "--out", str(tmp_path))
    everything = {path.name for path in (tmp_path / "units").iterdir()}
    assert _run("--space", "release", "--filter", "*_d64_m64n64_*", "--out", str(tmp_path)) == 0
    rest = {path.name for path in (tmp_path / "units").iterdir()}
    kept = {
        "fmha_fwd_sm89_d64_m64n64_s1_w2.cu",
        "fmha_fwd_sm89_d64_m64n64_s1_w4.cu",
        "unfused_sm89_m64n64_s4_w4.cu",
    }
    kept |= {"fmha_fwd_q8_sm89_d64_m64n64_s2_w4_int8.cu", "fmha_bwd_sm89_d64_m64n64_s2_w4_q64k64.cu"}
    kept |= {"fmha_bwd_fused_sm89_d64_m64n64_s2_w4.cu"}
    assert rest == kept < everything
    assert f"deleted {len(everything) - len(kept)}" in capsys.readouterr().out


def test_list_is_sorted_narrowed_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run("--list") == 0
    names = capsys.readouterr().out.splitlines()
    assert names == sorted(config.name for config in FAMILIES.build("release").kernels)
    unfused = [name for name in names if name.startswith("unfused_")]
    assert _run("--list", "--filter", "unfused_*") == 0
    assert capsys.readouterr().out.splitlines() == unfused
    assert _run("--list", "--families", "combine,unfused") == 0
    both = capsys.readouterr().out.splitlines()
    assert both == [name for name in names if name.startswith(("combine_", "unfused_"))]
    assert _run("--list", "--families", "combine,unfused", "--filter", "unfused_*") == 0
    assert capsys.readouterr().out.splitlines() == unfused
    assert list(tmp_path.iterdir()) == []


def test_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--space", "sweep", "--rejected", "--filter", "*_d80_m64n32_s1_w4_f16") == 0
    assert capsys.readouterr().out == (
        "fmha_fwd_sm89_d80_m64n32_s1_w4_f16: load: one pass of the K and V loads covers 64 rows, "
        "which do not divide block_n 32\n"
    )


def test_explain_prints_every_rule_and_the_resources(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--explain", KERNEL) == 0
    text = capsys.readouterr().out
    config = FAMILIES.parse(KERNEL)
    assert text.startswith(f"{KERNEL}\n  legal; in the spaces: ")
    assert "REFUSED" not in text
    for rule in FAMILIES.of(config).rules:
        assert f"  ok       {rule.name} " in text
    assert f"{config.smem_bytes} of 101376" in text
    assert f"about {config.registers} of 255 a thread" in text
    assert f"ctas_per_sm        {config.ctas_per_sm} " in text
    assert config.unit in text


def test_explain_of_an_illegal_kernel_in_no_space(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--explain", "fmha_fwd_sm89_d256_m128n128_s4_w4_f16_dropout") == 0
    text = capsys.readouterr().out
    assert "illegal; in the spaces: none" in text
    assert "  REFUSED  dropout                only the general kernels have dropout\n" in text
    assert "  REFUSED  smem                   589824 bytes" in text
    assert "  ok       block_m " in text


def test_explain_of_consumers_that_have_no_number_of_registers(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fmha_fwd_sm90_d64_m256n64_s2_w20_f16", "fmha_fwd_q8_sm90_d64_m256n64_s2_w20_f16_int8"):
        assert _run("--explain", name) == 0
        assert "REFUSED  block_m " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--space", "nightly"), "unknown space 'nightly'; there are smoke, release, sweep"),
        (("--families", "fmha_fwd,fwd"), "unknown family 'fwd'; there are fmha_fwd, fmha_fwd_sm90, "),
        (("--filter", "*_d65_*"), "no kernel of space release matches '*_d65_*'"),
        (("--list", "--filter", "*_d65_*"), "no kernel of space release matches '*_d65_*'"),
        (("--space", "sweep", "--filter", "*_d80_m64n32_s1_w4_f16"), "the rules refuse every kernel"),
        (("--explain", "flash"), "'flash' is not a kernel name; the grammar is"),
    ],
)
def test_wrong_requests_exit_2_and_write_nothing(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("generator: error: ")
    assert message in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--list", "--check"), ("--explain",), ("--nonsense",), ("release",)])
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as error:
        _run(*arguments)
    assert error.value.code == 2


def test_a_foreign_file_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "registry.cpp").write_text("mine")
    assert _run("--space", "smoke", "--out", str(tmp_path)) == 2
    assert "was not made by the generator" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["registry.cpp"]


def test_an_unwritable_folder_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert _run("--space", "smoke", "--out", str(tmp_path / "file" / "below")) == 2
    assert "generator: error: " in capsys.readouterr().err


def test_an_illegal_table_exits_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(families: Families, name: str) -> Space:
        raise IllegalTileError(f"{name}: a reason")

    monkeypatch.setattr(Families, "build", broken)
    assert _run("--list") == 2
    assert "release: a reason" in capsys.readouterr().err


def test_notes_about_the_manifest_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifest.json").write_text("{")
    assert _run("--space", "smoke", "--out", str(tmp_path)) == 0
    assert "generator: note: manifest.json is unreadable" in capsys.readouterr().err


def test_listing_imports_nothing_heavy() -> None:
    code = (
        "import sys; from generator.__main__ import main; main(['--list']); "
        "sys.exit(str([m for m in ('torch', 'numpy', 'jinja2', 'sdpa_cutlass') if m in sys.modules] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == "\n" or done.stderr == ""


def test_runs_as_a_module_from_the_root() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "generator", "--list", "--space", "smoke", "--filter", "*_d96_*_f16_causal"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == sorted(done.stdout.splitlines())
    assert done.stdout.startswith("fmha_fwd_sm89_d96_")


def test_a_closed_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m generator --space sweep --rejected | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
