"""`bundle` and `verify`: written, verified on the host library, moved, tampered with, forged."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdpa_cutlass.cli import main
from sdpa_cutlass.cli.bundles import archive, check, measuring, record
from sdpa_cutlass.cli.bundles.check import Answer

ROOT = Path(__file__).resolve().parents[2]
CASE = "host/b1_h2_s160_d64"
HOPPER = ROOT / "benchmarks" / "results" / "2026-11-24-h200-f16-hopper.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one problem on the host library."""
    path = tmp_path_factory.mktemp("bundle") / "one.zip"
    assert main(["bundle", CASE, "--device", "cpu", "--repeats", "2", "--quiet", "--out", str(path)]) == 0
    return path


def verify(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit status and the findings by their names."""
    status = main(["verify", str(path), "--device", "cpu", "--repeats", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["confirmed"] is (status == 0)
    return status, {finding["what"]: finding for finding in found["findings"]}


def forged(path: Path, target: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """A bundle with other files, whose manifest fits them: what a forger would write."""
    files = archive.read(path)
    change(files)
    archive.write(target, files)
    return target


def recorded(**values: Any) -> Callable[[dict[str, bytes]], None]:
    """A change of bundle.json."""

    def change(files: dict[str, bytes]) -> None:
        document = json.loads(files["bundle.json"])
        document.update(values)
        files["bundle.json"] = json.dumps(document).encode()

    return change


def replaced(name: str, old: str, new: str) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        text = files[name].decode()
        assert old in text
        files[name] = text.replace(old, new).encode()

    return change


def test_a_bundle_says_how_its_result_came_about(made: Path) -> None:
    files = archive.read(made)
    about = record.from_json(files["bundle.json"], "one")
    assert about.problem == CASE
    assert (about.dtype, about.device, about.seed, about.repeats) == ("f16", "cpu", 0, 2)
    assert about.kernel.startswith("fmha_fwd_sm89_d64_")
    assert len(about.samples_us["fused"]) == 2
    assert about.command[:5] == ["python", "-m", "sdpa_cutlass", "bundle", CASE]
    assert [set(found or ()) for found in (about.inputs, about.outputs)] == [{"q", "k", "v"}, {"out", "lse"}]
    assert about.kernel in files["README.txt"].decode()
    assert (files["unit.cu"] == b"") is (about.unit is None) is (about.no_unit is not None)
    assert str(ROOT) not in " ".join(text.decode() for text in files.values())  # no paths


def test_the_host_library_confirms_it(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, findings = verify(made, capsys)
    assert status == 0
    for what in ("kernel", "out", "lse", "q", "k", "v", "error of O", "library, by its file"):
        assert findings[what]["answer"] == "agrees", findings[what]
    assert findings["time"]["answer"] == "not compared"


def test_another_folder_and_process_confirm_it(made: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "renamed.zip"
    moved.parent.mkdir()
    moved.write_bytes(made.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "sdpa_cutlass", "verify", moved.name, "--device", "cpu", "--repeats", "1"],
        cwd=moved.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bundle confirmed: " in done.stdout


def test_another_library_repeats_what_it_can(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A build of other sources: what differs and what could not be repeated is said, and is no error."""

    def by_another_build(files: dict[str, bytes]) -> None:
        result = json.loads(files["result.json"])
        result["env"]["library"]["digest"] = "0" * 64
        files["result.json"] = json.dumps(result).encode()
        recorded(outputs={"out": "1" * 64, "lse": "2" * 64}, library="3" * 64)(files)

    path = forged(made, tmp_path / "other.zip", by_another_build)
    status, findings = verify(path, capsys)
    assert status == 0
    for what in ("library, by its sources", "library, by its file", "out", "lse"):
        assert findings[what]["answer"] == "differs"
    for what in ("q", "k", "v", "error of O", "file: kernel"):
        assert findings[what]["answer"] == "agrees"
    assert main(["verify", str(path), "--device", "cpu", "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    assert "not repeated here: outputs: another library or device\n" in text
    assert f"to repeat all of it: library {'0' * 16} on " in text
    assert "\nbundle not contradicted: " in text


def test_the_same_files_give_the_same_bytes(made: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.zip"
    archive.write(again, archive.read(made))
    assert again.read_bytes() == made.read_bytes()
    command = ["bundle", "mission/b1_h8_s512_d64", "--from", str(HOPPER), "--out"]
    assert main([*command, str(tmp_path / "a.zip")]) == main([*command, str(tmp_path / "b.zip")]) == 0
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_a_row_of_a_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the file did not keep is missing and said to be; the machine and all providers' rows are there."""
    path = tmp_path / "row.zip"
    assert main(["bundle", "mission/b1_h8_s512_d64", "--from", str(HOPPER), "--out", str(path)]) == 0
    capsys.readouterr()
    bundle = check.load(path)
    assert bundle.record.source is not None
    assert bundle.record.source["name"] == HOPPER.name
    assert (bundle.record.inputs, bundle.record.outputs, bundle.record.samples_us) == (None, None, {})
    assert bundle.machine["gpu"] == "NVIDIA H200"
    assert {row.provider for row in bundle.results.rows} > {"fused", "torch_flash"}
    status, findings = verify(path, capsys)
    assert status == 0
    assert findings["gpu"]["there"] == "NVIDIA H200"
    assert findings["time"]["answer"] == "not compared"
    assert findings["inputs and outputs, by digest"]["answer"] == "not compared"


def flipped(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) >= 1
    return data.replace(old, new)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: flipped(data, b'"seed": 0', b'"seed": 7'), "Bad CRC-32 for file 'bundle.json'"),
        (lambda data: data[:-7], "no bundle, or damaged"),
        (lambda data: b"junk" + data, "holds more than its entries"),
        (lambda data: b"not a zip", "no bundle, or damaged"),
    ],
)
def test_damage_is_found(
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[bytes], bytes],
    message: str,
) -> None:
    path = tmp_path / "damaged.zip"
    path.write_bytes(damage(made.read_bytes()))
    assert main(["verify", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(path) in error


def zipped(path: Path, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """An archive by another hand."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as target:
        for name, data in entries.items():
            target.writestr(name, data)
    path.write_bytes(buffer.getvalue())
    return path


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/passwd", "a/../../evil", "unit.cu/", "C:\\evil"])
def test_paths_are_refused_by_name_and_nothing_is_written(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    files = archive.read(made)
    path = zipped(tmp_path / "x.zip",
                  {**files, "manifest.json": b"{}", name: b"evil"})  # fmt: skip
    assert main(["verify", str(path)]) == 2
    assert "is none of README.txt, result.json" in capsys.readouterr().err
    assert sorted(one.name for one in tmp_path.rglob("*") if one.is_file()) == ["x.zip"]


def test_what_bundle_did_not_write_is_refused(made: Path, tmp_path: Path) -> None:
    files = archive.read(made)
    manifest = {name: archive.digest(data) for name, data in files.items()}
    whole = {**files, "manifest.json": json.dumps(manifest).encode()}
    for entries, compression, message in (
        (whole, zipfile.ZIP_STORED, "holds more than its entries"),  # other dates and modes
        (whole, zipfile.ZIP_DEFLATED, "is compressed"),
        ({**whole, "unit.cu": b"else"}, zipfile.ZIP_STORED, "unit.cu is not what manifest.json says"),
        (files, zipfile.ZIP_STORED, "must hold exactly"),
        ({**whole, "manifest.json": b"[" * 10**5}, zipfile.ZIP_STORED, "manifest.json is not JSON"),
    ):
        path = zipped(tmp_path / "x.zip", entries, compression)
        with pytest.raises(archive.BundleError, match=message):
            archive.read(path)
    (tmp_path / "big.zip").write_bytes(bytes(archive.MOST_BYTES + 1))
    with pytest.raises(archive.BundleError, match="larger than 16 MiB"):
        archive.read(tmp_path / "big.zip")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (recorded(outputs={"out": "0" * 64, "lse": "0" * 64}), "out"),
        (recorded(kernel="fmha_fwd_sm89_d64_m128n64_s2_w4_qreg_f16"), "file: kernel"),
        (recorded(samples_us={"fused": [1.0, 2.0]}), "file: median of fused"),
        (replaced("result.json", '"max_err_out": 0.000', '"max_err_out": 0.1'), "file: error of O"),
        (replaced("result.json", '"status": "ok"', '"status": "wrong: NaN"'), "file: status"),
    ],
)
def test_a_forger_is_found_by_running_it_again(
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, bytes]], None],
    what: str,
) -> None:
    """Every digest of the archive is right: what it claims is not."""
    status, findings = verify(forged(made, tmp_path / "forged.zip", change), capsys)
    assert status == 1
    assert findings[what]["answer"] == Answer.BROKEN.value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (recorded(problem="host/b9_h2_s160_d64"), "suite host has no problem 'host/b9_h2_s160_d64'"),
        (recorded(problem="mine/b1"), "of none of the suites"),
        (recorded(problem="host/b1_h2_s160_d32"), "no row of fused for host/b1_h2_s160_d32"),
        (recorded(seed="0"), "seed is '0'"),
        (recorded(samples_us={"fused": ["1"]}), "samples_us is"),
        (recorded(repeats=0), "repeats is 0"),
        (recorded(dtype="f64"), "dtype is 'f64'"),
        (recorded(inputs={"q": "abc"}), "digest of q is no SHA-256"),
        (recorded(format=2), "not of format 1"),
        (recorded(more=1), "exactly the keys"),
        (replaced("result.json", '"rows"', '"lines"'), "result.json: must be an object"),
    ],
)
def test_what_does_not_fit_is_refused(
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, bytes]], None],
    message: str,
) -> None:
    assert main(["verify", str(forged(made, tmp_path / "forged.zip", change))]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bundle", "host/b9", "--out", "x.zip"], "suite host has no problem 'host/b9'"),
        (["bundle", CASE, "--out", "x.tar"], "the name must end in .zip"),
        (["bundle", CASE, "--out", "x.zip", "--providers", "naive"], "must name fused"),
        (["bundle", CASE, "--out", "x.zip", "--from", str(HOPPER)], "no row of fused for"),
        (["verify", "missing.zip"], "cannot read missing.zip"),
    ],
)
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_unit_is_that_of_the_library_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated files of another digest are not taken for those that the library was compiled from."""
    library = tmp_path / "lib" / "x.so"
    monkeypatch.setattr(measuring, "library", lambda target: type("L", (), {"path": library})())
    generated = tmp_path / "generated"
    (generated / "units").mkdir(parents=True)
    (generated / "units" / "k.cu").write_text("kernel")
    rows = [{"name": "k_f16", "file": "units/k.cu"}]
    (generated / "manifest.json").write_text(json.dumps({"digest": "d", "kernels": rows}))
    assert measuring.unit_of("k_f16", "d") == measuring.Unit("units/k.cu", b"kernel", None)
    for kernel, digest in (("k_f16", "e"), ("other", "d"), ("k_f16", None)):
        assert measuring.unit_of(kernel, digest).text == b""


@pytest.mark.parametrize(
    ("after_us", "there", "here", "answer"),
    [
        (101.0, "A", "A", Answer.AGREES),
        (200.0, "A", "A", Answer.BROKEN),
        (200.0, "A", "B", Answer.NOT_COMPARED),
    ],
)
def test_times_of_the_same_gpu_have_to_agree(
    tmp_path: Path, after_us: float, there: str, here: str, answer: Answer
) -> None:
    """On made-up machines: this one needs no GPU."""
    path = tmp_path / "row.zip"
    assert main(["bundle", "mission/b1_h8_s512_d64", "--from", str(HOPPER), "--out", str(path)]) == 0
    bundle = check.load(path)
    before = bundle.ours
    library = bundle.machine["library"]
    factor = after_us / 100 * (before.gpu_us or 0)
    row = check.dataclasses.replace(before, gpu_us=factor)
    seen = measuring.Measured(
        results=check.Results({"gpu": here, "library": library}, [row]),
        kernel=before.kernel or "",
        samples_us={},
        inputs={},
        outputs={},
        library="",
    )
    machine = {"gpu": there, "library": library}
    bundle = check.dataclasses.replace(bundle, results=check.Results(machine, bundle.results.rows))
    found = {finding.what: finding for finding in check.compare_with(bundle, seen, "cuda")}
    assert found["time"].answer is answer
    assert found["kernel"].answer is Answer.AGREES


def test_what_was_not_repeated_is_said(tmp_path: Path) -> None:
    """A claim that another machine cannot check is no claim that it confirms."""
    path = tmp_path / "row.zip"
    assert main(["bundle", "mission/b1_h8_s512_d64", "--from", str(HOPPER), "--out", str(path)]) == 0
    bundle = check.load(path)
    assert "empty: no generated files" in archive.read(path)["README.txt"].decode()

    def said(kernel: Answer, time: Answer) -> str:
        findings = [
            check.Finding("kernel", "a", "b", kernel),
            check.Finding("time", "5 us", "-", time, "no GPU was used here"),
        ]
        is_confirmed = Answer.BROKEN not in (kernel, time)
        return check.to_text(bundle, findings, is_confirmed=is_confirmed, by="b on the host library")

    text = said(Answer.DIFFERS, Answer.NOT_COMPARED)
    assert "run here: b on the host library\n" in text
    assert "not repeated here: kernel: another library or device\n" in text
    assert "not repeated here: time: no GPU was used here\n" in text
    assert "to repeat all of it: library " in text
    assert " on NVIDIA H200\nbundle not contradicted: " in text
    assert "\nbundle confirmed: " in said(Answer.AGREES, Answer.AGREES)
    assert "\nbundle NOT confirmed: " in said(Answer.AGREES, Answer.BROKEN)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.zip"
    assert main(["bundle", "mission/b1_h8_s512_d64", "--device", "cuda", "--out", str(path)]) == 0
    capsys.readouterr()
    assert main(["verify", str(path), "--json"]) == 0
    found = {
        finding["what"]: finding["answer"] for finding in json.loads(capsys.readouterr().out)["findings"]
    }
    assert found["out"] == found["kernel"] == found["time"] == "agrees"
