"""The build backend: scikit-build-core, and on Linux the manylinux tag that a wheel's libraries allow.

The tag follows from the versioned symbols that they need of glibc and libstdc++ (PEP 600); it is written into
the file's name and into WHEEL. Everything else is scikit-build-core's.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import zipfile
from pathlib import Path

from scikit_build_core import build as _skbuild
from scikit_build_core.build import *  # noqa: F403  (every hook but the one below)

# What each platform has at least: glibc 2.x, libstdc++ GLIBCXX_3.4.x, CXXABI_1.3.x.
POLICIES = (
    (17, 19, 7),
    (24, 22, 10),
    (27, 24, 11),
    (28, 24, 11),
    (31, 28, 12),
    (34, 29, 13),
    (35, 30, 13),
    (38, 30, 13),
    (39, 33, 15),
)
_NEEDED = {
    "glibc": rb"GLIBC_2\.(\d+)(?:\.\d+)?\0",
    "libstdc++": rb"GLIBCXX_3\.4\.(\d+)\0",
    "CXXABI": rb"CXXABI_1\.3\.(\d+)\0",
}
Config = dict[str, "list[str] | str"]


def needed_versions(libraries: list[bytes]) -> tuple[int, int, int]:
    """The newest of each kind of versioned symbol that ELF files name; 0 for none."""
    newest = [
        max((int(number) for content in libraries for number in re.findall(pattern, content)), default=0)
        for pattern in _NEEDED.values()
    ]
    return newest[0], newest[1], newest[2]


def manylinux(libraries: list[bytes], machine: str) -> str | None:
    """The platform tag, e.g. manylinux_2_34_x86_64; None when no policy has all that is needed."""
    needed = needed_versions(libraries)
    if needed[0] == 0:
        return None  # not glibc's
    for policy in POLICIES:
        if all(has >= needs for has, needs in zip(policy, needed, strict=True)):
            return f"manylinux_2_{policy[0]}_{machine}"
    return None


def retag(wheel: Path) -> Path:
    """Renames a linux_* wheel to the manylinux tag that its libraries allow, and returns where it is now."""
    before = re.search(r"-(linux_(\w+))\.whl$", wheel.name)
    if before is None:
        return wheel
    with zipfile.ZipFile(wheel) as source:
        libraries = [source.read(name) for name in source.namelist() if name.endswith(".so")]
        tag = manylinux(libraries, before[2])
        if tag is None:
            return wheel
        target = wheel.with_name(wheel.name.replace(before[1], tag))
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            _rewrite(source, temporary, before[1], tag)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    wheel.unlink()
    return target


def _rewrite(source: zipfile.ZipFile, path: Path, before: str, tag: str) -> None:
    """Copies the wheel; in WHEEL the tag changes, in RECORD that file's digest and size."""
    (name,) = (name for name in source.namelist() if name.endswith(".dist-info/WHEEL"))
    old = source.read(name)
    new = old.replace(before.encode(), tag.encode())
    with zipfile.ZipFile(path, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            if info.filename == name:
                content = new
            elif info.filename.endswith(".dist-info/RECORD"):
                content = content.replace(_row(name, old).encode(), _row(name, new).encode())
            target.writestr(info, content)


def _row(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


def build_wheel(
    wheel_directory: str, config_settings: Config | None = None, metadata_directory: str | None = None
) -> str:
    """PEP 517's hook: builds the wheel and returns its name."""
    name = _skbuild.build_wheel(wheel_directory, config_settings, metadata_directory)
    return retag(Path(wheel_directory, name)).name
