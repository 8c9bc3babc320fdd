"""Who else could have written a library: owners, groups, folders, links, and the way out for odd machines."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdpa_cutlass import ArgumentError, LibraryError, UntrustedLibraryError
from sdpa_cutlass.library import locate, trust
from sdpa_cutlass.library.locate import Target


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file in a folder where nothing is wrong, named by the environment variable."""
    monkeypatch.delenv("SDPA_CUTLASS_PERMISSIONS", raising=False)
    folder = tmp_path / "outer" / "lib"
    folder.mkdir(parents=True)
    for place in (folder.parent, folder):
        place.chmod(0o755)
    path = folder / "libx.so"
    path.touch()
    path.chmod(0o644)
    monkeypatch.setenv("SDPA_CUTLASS_HOST_LIBRARY", str(path))
    assert locate.locate(Target.HOST) == path
    return path


def refused(match: str) -> str:
    with pytest.raises(UntrustedLibraryError, match=match) as caught:
        locate.locate(Target.HOST)
    return str(caught.value)


def _file(library: Path) -> Path:
    return library


def _folder(library: Path) -> Path:
    return library.parent


def _outer_folder(library: Path) -> Path:
    return library.parent.parent


PLACES = pytest.mark.parametrize("place", [_file, _folder, _outer_folder])


@PLACES
def test_what_anyone_can_write_is_refused(library: Path, place: Callable[[Path], Path]) -> None:
    found = place(library)
    found.chmod(0o777)
    message = refused(f"{found} has mode 0777, so anyone can write to it")
    assert f"chmod go-w {found}" in message
    assert "SDPA_CUTLASS_PERMISSIONS=ignore" in message


@PLACES
def test_what_belongs_to_another_user_is_refused(
    library: Path, place: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = place(library)
    _give(found, 12345, monkeypatch)
    assert f"chown -h {os.geteuid()} {found}" in refused(f"{found} has mode .*, so its owner 12345 can write")


def _give(place: Path, owner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As chown, which only root may do."""
    look = Path.lstat

    def lstat(path: Path) -> object:
        status = look(path)
        if path != place:
            return status
        return SimpleNamespace(st_uid=owner, st_gid=status.st_gid, st_mode=status.st_mode)

    monkeypatch.setattr(Path, "lstat", lstat)


def test_root_may_own_it(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    for place in (library, *library.parents):
        _give(place, 0, monkeypatch)
    assert locate.locate(Target.HOST) == library
    _give(library, 4321, monkeypatch)
    assert locate.locate(Target.HOST) == library


def test_in_a_folder_with_the_sticky_bit_only_owners_count(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.parent.chmod(0o1777)
    assert locate.locate(Target.HOST) == library
    _give(library, 12345, monkeypatch)
    refused("owner 12345")


@pytest.mark.parametrize(
    ("members", "primary", "who"),
    [
        ([], [], None),
        (["root"], [], None),
        (["bob"], [], "bob of its group"),
        ([], ["bob"], "bob of its group"),
        (["nobody-knows"], [], "nobody-knows of its group"),
        (["bob", "eve"], ["ann", "dan"], "ann, bob, dan … of its group"),
        (None, [], "which the system does not know"),
    ],
)
@PLACES
def test_a_group_may_write_when_nobody_else_is_in_it(
    library: Path,
    place: Callable[[Path], Path],
    members: list[str] | None,
    primary: list[str],
    who: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gid = library.stat().st_gid
    users = [SimpleNamespace(pw_name="root", pw_uid=0, pw_gid=0)]
    if os.geteuid():
        users.append(SimpleNamespace(pw_name="me", pw_uid=os.geteuid(), pw_gid=gid))
    for number, name in enumerate(("ann", "bob", "dan", "eve")):
        users.append(
            SimpleNamespace(pw_name=name, pw_uid=2**31 - 9 + number, pw_gid=gid if name in primary else -1)
        )
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    groups = {} if members is None else {gid: SimpleNamespace(gr_mem=members)}
    monkeypatch.setattr(grp, "getgrgid", lambda asked: groups[asked])
    found = place(library)
    found.chmod(0o775)
    if who is None:
        assert locate.locate(Target.HOST) == library
    else:
        refused(f"{found} has mode 0775, so .*{who}.* can write to it")


def test_an_access_control_list_may_name_anybody(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwall", list)
    monkeypatch.setattr(grp, "getgrgid", lambda asked: SimpleNamespace(gr_mem=[]))
    library.chmod(0o664)
    assert locate.locate(Target.HOST) == library
    monkeypatch.setattr(os, "getxattr", lambda place, name: b"\2", raising=False)
    refused("whoever its access control list names can write")


def test_every_link_of_a_chain_is_looked_at(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """first/libx.so → second/libx.so → third, a link to the folder, which is named relatively."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir(mode=0o755)
    third = tmp_path / "third"
    third.symlink_to("outer/../outer/lib")
    (folders[1] / "libx.so").symlink_to(third / "libx.so")
    (folders[0] / "libx.so").symlink_to("../second/libx.so")
    monkeypatch.setenv("SDPA_CUTLASS_HOST_LIBRARY", str(folders[0] / "libx.so"))
    assert locate.locate(Target.HOST) == library
    for folder in folders:
        folder.chmod(0o777)
        refused(f"{folder} has mode 0777, so anyone can write to it")
        folder.chmod(0o755)
    for link in (folders[0] / "libx.so", folders[1] / "libx.so", third):
        with monkeypatch.context() as owned:
            _give(link, 12345, owned)
            refused(f"{link} has mode .*, so its owner 12345")
    assert locate.locate(Target.HOST) == library


def test_a_way_of_endless_links_is_an_error_of_ours(tmp_path: Path) -> None:
    """Such as links that are turned while they are followed; the system ends at 40 as well."""
    links = [tmp_path / f"link{number}" for number in range(41)]
    (tmp_path / "end").touch(mode=0o644)
    for link, target in zip(links, [*links[1:], tmp_path / "end"], strict=True):
        link.symlink_to(target)
    assert trust.check(links[1]) == tmp_path / "end"
    with pytest.raises(LibraryError, match=r"cannot be looked at: .*symbolic links"):
        trust.check(links[0])


def test_permissions_can_be_ignored_where_they_cannot_hold(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.parent.chmod(0o777)
    refused("anyone")
    monkeypatch.setenv("SDPA_CUTLASS_PERMISSIONS", "ignore")
    assert locate.locate(Target.HOST) == library
    monkeypatch.setenv("SDPA_CUTLASS_PERMISSIONS", "1")
    with pytest.raises(ArgumentError, match="PERMISSIONS is '1'; allowed is 'ignore', or nothing"):
        locate.locate(Target.HOST)


def test_a_place_that_cannot_be_looked_at_is_an_error_of_ours(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as closed:
        closed.setattr(Path, "lstat", refuse)
        with pytest.raises(LibraryError, match=r"cannot be looked at: .*Permission denied"):
            locate.locate(Target.HOST)
    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(LibraryError, match=r"libx\.so: Permission denied"):
        locate.locate(Target.HOST)
