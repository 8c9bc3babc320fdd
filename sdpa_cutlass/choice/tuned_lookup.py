"""Where tuned tables lie, and the one that applies to a library on a device.

Order: the path in SDPA_CUTLASS_TUNED_TABLE, alone, when it is set ("off": no table at all); otherwise the
user's own, `<cache>/sdpa_cutlass/tuned/<gpu>.json` with XDG_CACHE_HOME or ~/.cache for <cache>, which is
where `python -m sdpa_cutlass tune` writes; then the one that the package ships,
`sdpa_cutlass/tuned/<gpu>.json`. <gpu> is the GPU's name as `file_stem` writes it. On a CPU only the variable
counts.

A table is looked for once for each library and device, at the first choice of a kernel. One that is not for
them, or not a table, is announced by a warning and passed over; no error ever comes from here. Tables are
data: all that a bad one can do is name a slower kernel, so unlike libraries they may lie anywhere.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..library.device import DeviceInfo
from ..library.locate import Target
from ..library.registry import read_kernels
from ..problem import Problem
from .tuned_table import (
    MAX_BYTES,
    HeadDims,
    Nearest,
    TunedRow,
    TunedTable,
    TunedTableError,
    bucket_of,
    from_json,
    misfit,
)

if TYPE_CHECKING:
    from ..library.abi import Library

TABLE_VARIABLE = "SDPA_CUTLASS_TUNED_TABLE"
NO_TABLE = "off"  # the variable's value for none


@dataclass(frozen=True, slots=True)
class Tables:
    """The table in use, ready to be asked."""

    path: Path
    table: TunedTable
    nearest: Nearest
    head_dims: HeadDims

    def nearest_to(self, problem: Problem) -> tuple[TunedRow, float] | None:
        """The row that was measured nearest to `problem` and how many octaves away, or None."""
        bucket = bucket_of(problem, self.head_dims)
        return None if bucket is None else self.nearest(bucket)


_lock = threading.Lock()
_found: dict[tuple[Library, DeviceInfo], Tables | None] = {}


def tables_for(library: Library, device: DeviceInfo) -> Tables | None:
    """The table for `library` on `device`, or None; read at the first call, which may warn."""
    key = (library, device)
    try:
        return _found[key]
    except KeyError:
        pass
    complaints: list[str] = []
    with _lock:
        if key not in _found:
            _found[key] = find(library, device, complaints)
    for complaint in complaints:
        warnings.warn(complaint, stacklevel=2)
    return _found[key]


def forget() -> None:
    """Makes the next choice look for tables again."""
    _found.clear()


def find(library: Library, device: DeviceInfo, complaints: list[str]) -> Tables | None:
    """The first table that fits; what is wrong with the others is added to `complaints`."""
    explicit = os.environ.get(TABLE_VARIABLE)
    if explicit == NO_TABLE:
        return None
    for path in [Path(explicit)] if explicit else default_paths(device):
        try:
            if not path.is_absolute():
                raise TunedTableError("it is not an absolute path")
            table = read(path)
            if table is None:
                if explicit:
                    raise TunedTableError("there is no such file")
                continue
            kernels = read_kernels(library)
            if device.target is Target.HOST and table.gpu != device.name:
                continue  # a GPU's table, given to a process that also uses the CPU
            complaint = misfit(table, kernels, device)
            if complaint:
                raise TunedTableError(complaint)
        except TunedTableError as error:
            origin = f"{TABLE_VARIABLE}={path}" if explicit else str(path)
            complaints.append(f"tuned table {origin} is not used, so kernels are chosen without it: {error}")
        else:
            return Tables(path, table, Nearest(table), HeadDims(kernels))
    return None


@dataclass(frozen=True, slots=True)
class Tuned:
    """A measured choice: its row, the name of the table, and how many octaves away it was measured."""

    row: TunedRow
    table: str
    distance: float

    def __str__(self) -> str:
        text = f"tuned table {self.table}: {self.row.gpu_ns / 1e3:.2f} µs at {self.row.bucket}"
        return text + (f", {self.distance:.2f} octaves from here" if self.distance else "")


def tuned_kernel(library: Library, problem: Problem, device: DeviceInfo) -> Tuned | None:
    """The fused kernel that was measured to be the fastest nearby; None without a table or a row near enough.

    The first call reads the tuned table, and warns when there is one that cannot be used.
    """
    tables = tables_for(library, device)
    if tables is None:
        return None
    found = tables.nearest_to(problem)
    return None if found is None else Tuned(found[0], tables.path.name, found[1])


def default_paths(device: DeviceInfo) -> list[Path]:
    """Where a table of `device` may lie when the variable does not say."""
    if device.target is Target.HOST:
        return []
    name = f"{file_stem(device.name)}.json"
    cache = cache_folder()
    own = [cache / name] if cache is not None else []
    return [*own, Path(__file__).resolve().parents[1] / "tuned" / name]


def cache_folder() -> Path | None:
    """The folder of the user's own tables, or None when the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "sdpa_cutlass", "tuned") if os.path.isabs(base) else None


def file_stem(gpu: str) -> str:
    """A GPU's name in lower case, with `_` for everything but letters and digits: `nvidia_h200`."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")[:80]


def read(path: Path) -> TunedTable | None:
    """The table in the file `path`, or None when there is none. Raises TunedTableError, and nothing else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise TunedTableError(f"it cannot be opened: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise TunedTableError("it is not a regular file")
        with open(handle, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise TunedTableError(f"it is larger than {MAX_BYTES} bytes")
        return from_json(content.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TunedTableError(f"it cannot be read: {error}") from error
    finally:
        os.close(handle)
