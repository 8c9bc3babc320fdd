"""What reaches the disk, what is deleted, and what is left alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from generator.core.render import MANIFEST, MARKER
from generator.core.writer import Difference, ForeignFileError, compare, write


def _files(**units: str) -> dict[str, str]:
    """Generated files as `render` makes them: unit name → what it holds beside the mark."""
    files = {f"units/{name}.cu": f"// {MARKER}\n{text}\n" for name, text in units.items()}
    files["registry.cpp"] = f"// {MARKER}\n{' '.join(sorted(units))}\n"
    manifest = {"files": sorted(files), "kernels": [], "digest": str(sorted(units.items()))}
    return {**files, MANIFEST: json.dumps(manifest, indent=1) + "\n"}


def _on_disk(out: Path) -> dict[str, str]:
    return {p.relative_to(out).as_posix(): p.read_text() for p in out.rglob("*") if p.is_file()}


def _stamps(out: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in out.rglob("*") if p.is_file()}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "not yet" / "there"


def test_writes_exactly_the_files(out: Path) -> None:
    files = _files(a="1", b="2")
    difference = write(files, out)
    assert _on_disk(out) == files
    assert set(difference.missing) == set(files)


def test_second_run_touches_nothing(out: Path) -> None:
    write(_files(a="1", b="2"), out)
    before = _stamps(out)
    assert not write(_files(a="1", b="2"), out)
    assert _stamps(out) == before


def test_only_what_changed_is_written(out: Path) -> None:
    write(_files(a="1", b="2"), out)
    before = _stamps(out)
    difference = write(_files(a="1", b="3"), out)
    after = _stamps(out)
    assert {name for name in after if after[name] != before[name]} == {"b.cu", MANIFEST}
    assert difference.changed == (MANIFEST, "units/b.cu")
    assert _on_disk(out) == _files(a="1", b="3")


def test_stale_files_are_deleted_with_their_empty_folder(out: Path) -> None:
    write(_files(a="1", b="2"), out)
    assert write(_files(a="1"), out).stale == ("units/b.cu",)
    assert _on_disk(out) == _files(a="1")
    write(_files(), out)
    assert _on_disk(out) == _files()
    assert not (out / "units").exists()


def test_foreign_files_stay(out: Path) -> None:
    write(_files(a="1"), out)
    mine = out / "units" / "mine.cu"
    mine.write_text("mine")
    marked = out / "units" / "marked.cu"
    marked.write_text(f"// {MARKER}\nbut in no manifest\n")
    write(_files(), out)
    assert _on_disk(out) == {**_files(), "units/mine.cu": "mine", "units/marked.cu": marked.read_text()}


def test_a_stale_file_that_somebody_replaced_stays(out: Path) -> None:
    write(_files(a="1"), out)
    (out / "units" / "a.cu").write_text("mine now")
    assert write(_files(), out).stale == ()
    assert (out / "units" / "a.cu").read_text() == "mine now"


def test_an_edited_generated_file_is_restored(out: Path) -> None:
    write(_files(a="1"), out)
    (out / "units" / "a.cu").write_text("edited")
    assert write(_files(a="1"), out).changed == ("units/a.cu",)
    assert _on_disk(out) == _files(a="1")


@pytest.mark.parametrize("path", ["units/a.cu", "registry.cpp"])
def test_a_foreign_file_in_the_way_is_refused_before_anything_changes(out: Path, path: str) -> None:
    (out / path).parent.mkdir(parents=True)
    (out / path).write_text("mine")
    with pytest.raises(ForeignFileError, match="not made by the generator; move it"):
        write(_files(a="1"), out)
    assert _on_disk(out) == {path: "mine"}


@pytest.mark.parametrize(
    "text", ["{}", "[]", '"files"', '{"files": ["index.html"]}', '{"name": "a web app"}']
)
def test_a_manifest_of_somebody_else_is_refused(out: Path, text: str) -> None:
    out.mkdir(parents=True)
    (out / MANIFEST).write_text(text)
    with pytest.raises(ForeignFileError, match=MANIFEST):
        write(_files(a="1"), out)
    assert _on_disk(out) == {MANIFEST: text}


def test_a_folder_in_the_way_is_refused(out: Path) -> None:
    (out / "units" / "a.cu").mkdir(parents=True)
    with pytest.raises(ForeignFileError, match="not made by the generator"):
        write(_files(a="1"), out)
    assert compare(_files(a="1"), out).changed == ("units/a.cu",)


def test_a_file_instead_of_the_folder_is_refused(out: Path) -> None:
    out.parent.mkdir(parents=True)
    out.write_text("mine")
    with pytest.raises(ForeignFileError, match="not a folder"):
        write(_files(a="1"), out)
    assert out.read_text() == "mine"


def test_a_link_out_of_the_folder_is_refused(out: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    out.mkdir(parents=True)
    (out / "units").symlink_to(elsewhere)
    with pytest.raises(ForeignFileError, match="through a link"):
        write(_files(a="1"), out)
    assert list(elsewhere.iterdir()) == []


def test_a_linked_folder_as_a_whole_is_fine(out: Path, tmp_path: Path) -> None:
    out.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(out)
    write(_files(a="1"), link)
    assert _on_disk(out) == _files(a="1")


@pytest.mark.parametrize("text", ["", "{", "\x00", "not json"])
def test_an_unreadable_manifest_is_replaced_and_said(out: Path, text: str) -> None:
    write(_files(a="1", b="2"), out)
    (out / MANIFEST).write_text(text)
    difference = write(_files(a="1"), out)
    assert any("unreadable" in note for note in difference.notes)
    assert difference.stale == ()
    assert _on_disk(out) == {**_files(a="1"), "units/b.cu": _files(b="2")["units/b.cu"]}


@pytest.mark.parametrize("listed", [None, {"a": 1}, [1], "units/b.cu"])
def test_a_manifest_without_a_list_owns_nothing(out: Path, listed: object) -> None:
    write(_files(a="1", b="2"), out)
    (out / MANIFEST).write_text(json.dumps({"kernels": [], "files": listed}))
    difference = write(_files(a="1"), out)
    assert any("lists no files" in note for note in difference.notes)
    assert (out / "units" / "b.cu").exists()


@pytest.mark.parametrize(
    "path", ["../victim.cu", "/VICTIM", "units/../../victim.cu", "link/victim.cu", ".", "", "a\\b"]
)
def test_a_manifest_cannot_have_files_elsewhere_deleted(out: Path, path: str) -> None:
    write(_files(a="1"), out)
    victim = out.parent / "victim.cu"
    victim.write_text(f"// {MARKER}\n")
    (out / "link").symlink_to(out.parent)
    listed = path.replace("/VICTIM", str(victim))
    (out / MANIFEST).write_text(json.dumps({"kernels": [], "files": [listed]}))
    difference = write(_files(a="1"), out)
    assert victim.exists()
    assert any("no path of this folder" in note for note in difference.notes)


def test_a_link_is_never_taken_for_ours(out: Path, tmp_path: Path) -> None:
    write(_files(a="1", b="2"), out)
    target = tmp_path / "target.cu"
    target.write_text(f"// {MARKER}\n")
    (out / "units" / "b.cu").unlink()
    (out / "units" / "b.cu").symlink_to(target)
    write(_files(a="1"), out)
    assert (out / "units" / "b.cu").is_symlink()
    assert target.exists()


class CutError(Exception):
    """Stands for a power cut."""


def _cut_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Lets that many renames and deletions happen, then fails."""
    left = [steps]

    def limited(name: str, real: object) -> None:
        def step(*args: object, **kwargs: object) -> object:
            if left[0] == 0:
                raise CutError
            left[0] -= 1
            return real(*args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(os if name == "replace" else Path, name, step)

    limited("replace", os.replace)
    limited("unlink", Path.unlink)


@pytest.mark.parametrize("steps", range(9))
def test_a_run_that_is_cut_off_is_completed_by_the_next(out: Path, steps: int) -> None:
    """Three files come, one changes, two go: cut anywhere, and then a third, different run."""
    old = _files(a="1", b="2", c="3")
    new = _files(a="x", d="4", e="5", f="6")
    write(old, out)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _cut_after(monkeypatch, steps)
        with pytest.raises(CutError):
            write(new, out)
        assert all(text in (old.get(path), new.get(path)) for path, text in _visible(out).items())
    assert compare(new, out)
    write(_files(g="7"), out)
    assert _visible(out) == _files(g="7")


def test_the_cut_test_reaches_the_last_step(out: Path) -> None:
    write(_files(a="1", b="2", c="3"), out)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _cut_after(monkeypatch, 9)
        write(_files(a="x", d="4", e="5", f="6"), out)
    assert _visible(out) == _files(a="x", d="4", e="5", f="6")


def _visible(out: Path) -> dict[str, str]:
    """Files but for temporary ones; the manifest only when it is not a journal."""
    return {
        path: text
        for path, text in _on_disk(out).items()
        if not Path(path).name.startswith(".") and not (path == MANIFEST and _is_journal(text, out))
    }


def _is_journal(text: str, out: Path) -> bool:
    listed = json.loads(text)["files"]
    return "registry.cpp" in listed and {"units/b.cu", "units/d.cu"} <= set(listed)


def test_a_failed_write_leaves_the_old_text_and_no_temporary_file(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(_files(a="1"), out)

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:3])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space left"):
        write(_files(a="2"), out)
    monkeypatch.undo()
    assert _on_disk(out) == _files(a="1")


def test_new_files_have_ordinary_permissions(out: Path) -> None:
    old = os.umask(0o022)
    try:
        write(_files(a="1"), out)
    finally:
        os.umask(old)
    assert (out / "units" / "a.cu").stat().st_mode & 0o777 == 0o644


def test_compare_reads_only(out: Path) -> None:
    assert set(compare(_files(a="1"), out).missing) == set(_files(a="1"))
    assert not out.exists()
    write(_files(a="1", b="2"), out)
    before = _stamps(out)
    difference = compare(_files(a="2", c="3"), out)
    assert difference == Difference(
        missing=("units/c.cu",), changed=(MANIFEST, "registry.cpp", "units/a.cu"), stale=("units/b.cu",)
    )
    assert difference.lines() == [
        "missing: units/c.cu",
        f"differs: {MANIFEST}",
        "differs: registry.cpp",
        "differs: units/a.cu",
        "stale: units/b.cu",
    ]
    assert _stamps(out) == before


def test_line_ends_are_kept(out: Path) -> None:
    write(_files(a="1"), out)
    assert b"\r" not in (out / "units" / "a.cu").read_bytes()
    (out / "units" / "a.cu").write_bytes(_files(a="1")["units/a.cu"].replace("\n", "\r\n").encode())
    assert compare(_files(a="1"), out).changed == ("units/a.cu",)
