"""Whether anybody but root and the user of this process could have written or replaced a file.

The way to a file is every folder from / on and every link, one after the other, and then the file. Each of
them has to belong to root or to the user of this process, and nobody else may write to it. There are two
exceptions. A group may, when the system's databases list no other member of it and there is no access control
list. Anybody may write to a folder with the sticky bit, such as /tmp: only owners can move things away there.

Where this cannot hold, SDPA_CUTLASS_PERMISSIONS=ignore ends it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import ArgumentError, LibraryError, UntrustedLibraryError

VARIABLE = "SDPA_CUTLASS_PERMISSIONS"
"""The environment variable that may say "ignore"."""

_MAX_LINKS = 40  # as Linux


def check(path: Path) -> Path:
    """The file at the absolute `path`, without links, when nobody else could have written or replaced it.

    Raises UntrustedLibraryError otherwise, LibraryError for a place that cannot be looked at, and
    ArgumentError for another value of the variable.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "ignore"):
        raise ArgumentError(f"{VARIABLE} is {wanted!r}; allowed is 'ignore', or nothing")
    place = path
    try:
        if wanted or os.name != "posix":
            return path.resolve()
        for place, status in _way(path):
            problem, fix = _problem(place, status)
            if problem:
                raise UntrustedLibraryError(
                    f"{path} is not loaded: {place} has mode {stat.S_IMODE(status.st_mode):04o}, so "
                    f"{problem}. {fix}; on a machine where this cannot be, set {VARIABLE}=ignore."
                )
    except OSError as error:
        raise LibraryError(f"{path} is not loaded: it cannot be looked at: {error}") from error
    return place


def _way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every folder and link on the way to `path`, then the file; only the last part of each may be a link."""
    place = Path(path.anchor)
    yield place, place.lstat()
    ahead = list(reversed(path.parts[1:]))
    links = 0
    while ahead:
        name = ahead.pop()
        if name == "..":
            place = place.parent
            continue
        status = (place / name).lstat()
        yield place / name, status
        if not stat.S_ISLNK(status.st_mode):
            place /= name
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = (place / name).readlink()
        if target.is_absolute():
            place = Path(target.anchor)
        ahead += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _problem(place: Path, status: os.stat_result) -> tuple[str, str]:
    """What is wrong with one hop, and what puts it right; both empty when nothing is."""
    user, mode = os.geteuid(), status.st_mode
    if status.st_uid not in (0, user):
        return (
            f"its owner {status.st_uid} can write to it; allowed are root and {user}, who runs this process",
            f"Run `chown -h {user} {place}` as root",
        )
    if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return "", ""
    who = ""
    if mode & stat.S_IWOTH:
        who = "anyone"
    elif mode & stat.S_IWGRP:
        who = _others_in_group(status.st_gid, user) or _others_by_access_list(place)
    return (f"{who} can write to it", f"Run `chmod go-w {place}`") if who else ("", "")


def _others_in_group(group: int, user: int) -> str:
    """Who else belongs to the group, as far as the databases of users and groups tell; empty for nobody."""
    import grp
    import pwd

    users = pwd.getpwall()
    uids = {entry.pw_name: entry.pw_uid for entry in users}
    try:
        members = {*grp.getgrgid(group).gr_mem, *(entry.pw_name for entry in users if entry.pw_gid == group)}
    except KeyError:
        return f"its group {group}, which the system does not know,"
    others = sorted(name for name in members if uids.get(name) not in (0, user))
    return f"{', '.join(others[:3])}{' …' * (len(others) > 3)} of its group {group}" if others else ""


def _others_by_access_list(place: Path) -> str:
    """An access control list may name anybody; the bits of the group are then what it allows at most."""
    try:
        os.getxattr(place, "system.posix_acl_access")
    except (AttributeError, OSError):  # not Linux; none, or a file system without lists
        return ""
    return "whoever its access control list names"
