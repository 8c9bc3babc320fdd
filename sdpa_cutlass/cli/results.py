"""The one result format of this project, `{"format": 4, "env": {...}, "rows": [...]}`.

`env` describes the machine and the software (environment.py). There is one row per problem and provider: the
problem, who computed it, how long that took and how wrong it was. Units: gpu_us and wall_us are microseconds
per call (timing.py defines them), tflops 1e12 floating-point operations per second under the convention of
Problem.flops, less what lengths cut off; errors absolute. `visible` is the share of the scores that a mask or
lengths let through. What was not measured is null. `status` starts with "ok" when the row can be trusted;
otherwise it says why not. floor_us is the least time that the hardware allows (roofline.py).

load() refuses whatever is not exactly this; save() writes a file completely or not at all. Files of format 1
had no "format" and no `visible`, for there were no masks: they are read as if it were 1. Those of format 2
had no `alignment`, for all causal masks were top_left, and not the other keys of ADDED. Those of format 3 had
no `bound_out`, what max_err_out may be.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import tempfile
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = 4
PROVIDERS = (
    "fused",
    "plain",
    "piped",
    "torch_flash",
    "torch_cudnn",
    "torch_efficient",
    "torch_math",
    "naive",
)
# Other libraries (peers.py): they take part in `bench` where they are installed.
PEERS = ("flash_attn", "flash_attn_3", "flash_attn_4", "xformers", "flashinfer", "sageattention")
# The ways to call this library and torch whose time in Python is measured (wall.py).
WALL_PROVIDERS = ("plan_run", "attention_out", "sdpa", "plan_make", "torch_default")
INVALID = "invalid"  # begins the status of a time that cannot be
ADDED: dict[int, dict[str, Any]] = {  # by format: keys that came with it, and what older files mean
    2: {"visible": 1.0},
    3: {
        "alignment": "top_left",
        "input_sets": None,
        "wall_us_spread": None,
        "loop_us": None,
        "floor_us": None,
    },
    4: {"bound_out": None},
}


class ResultFormatError(ValueError):
    """A result file that does not follow the format; the message names file, row and key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One problem computed by one provider."""

    suite: str
    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    causal: bool
    alignment: str = "top_left"  # of the causal mask, where there is one
    mask: str
    p_dropout: float
    visible: float
    provider: str
    kernel: str | None = None
    gpu_us: float | None = None
    gpu_us_spread: float | None = None
    wall_us: float | None = None
    wall_us_spread: float | None = None
    loop_us: float | None = None
    floor_us: float | None = None
    input_sets: int | None = None
    tflops: float | None = None
    max_err_out: float | None = None
    max_err_lse: float | None = None
    bound_out: float | None = None
    status: str = "ok"

    @property
    def ok(self) -> bool:
        """True when the row's numbers can be trusted."""
        return self.status.startswith("ok")

    @property
    def time_us(self) -> float | None:
        """GPU time where there is one, otherwise wall time."""
        return self.gpu_us if self.gpu_us is not None else self.wall_us

    @property
    def problem(self) -> tuple[Any, ...]:
        """What two rows share when they solve the same problem."""
        return tuple(getattr(self, name) for name in PROBLEM_KEYS)


ROW_KEYS = tuple(field.name for field in dataclasses.fields(Row))
PROBLEM_KEYS = ROW_KEYS[: ROW_KEYS.index("provider")]


@dataclasses.dataclass(frozen=True)
class Results:
    """Rows and the machine that they were taken on."""

    env: Mapping[str, Any]
    rows: Sequence[Row]


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity; an error that is one must still be told from one that was not measured."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def to_json(results: Results) -> str:
    """The text of a result file: keys in a fixed order, one row a line, so that versions can be compared."""
    rows = [
        "  "
        + json.dumps({key: _finite(value) for key, value in dataclasses.asdict(row).items()}, allow_nan=False)
        for row in results.rows
    ]
    env = json.dumps(dict(results.env), indent=1, allow_nan=False)
    body = "[\n" + ",\n".join(rows) + "\n]" if rows else "[]"
    return f'{{"format": {FORMAT},\n"env": {env},\n"rows": {body}}}\n'


def from_json(text: str, *, origin: str = "result") -> Results:
    """Parses and validates a result file's text; `origin` names it in errors. Raises ResultFormatError."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # too long a number, or too deep
        raise ResultFormatError(f"{origin}: not JSON: {str(error)[:200]}") from error
    if not isinstance(document, dict) or set(document) | {"format"} != {"format", "env", "rows"}:
        raise ResultFormatError(
            f'{origin}: must be an object with exactly the keys "format", "env" and "rows"'
        )
    version, env, rows = document.get("format", 1), document["env"], document["rows"]
    if type(version) is not int or not 1 <= version <= FORMAT:
        raise ResultFormatError(f"{origin}: format {version!r} is not among 1 to {FORMAT}")
    if not isinstance(env, dict):
        raise ResultFormatError(f"{origin}: env must be an object")
    if not isinstance(rows, list):
        raise ResultFormatError(f"{origin}: rows must be a list")
    added = {key: value for since in ADDED if version < since for key, value in ADDED[since].items()}
    return Results(env, [_parse_row(row, added, f"{origin}: row {index}") for index, row in enumerate(rows)])


def _parse_row(row: Any, added: Mapping[str, Any], where: str) -> Row:
    """A row as a file has it, completed by the values that its format did not write yet."""
    if not isinstance(row, dict):
        raise ResultFormatError(f"{where}: must be an object")
    row = {**added, **row}
    missing = [key for key in ROW_KEYS if key not in row]
    unknown = [key for key in row if key not in ROW_KEYS]
    if missing or unknown:
        raise ResultFormatError(f"{where}: missing keys {missing}, unknown keys {unknown}")
    types_of = typing.get_type_hints(Row)
    parsed = Row(**{key: _parse_value(row[key], types_of[key], f"{where}: {key}") for key in ROW_KEYS})
    known = (*PROVIDERS, *PEERS, *WALL_PROVIDERS)
    if parsed.provider not in known:
        raise ResultFormatError(f"{where}: provider {parsed.provider!r} is none of {', '.join(known)}")
    if not parsed.status:
        raise ResultFormatError(f"{where}: status is empty")
    return parsed


def _parse_value(value: Any, wanted: Any, where: str) -> Any:
    choices = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    if float in choices and value in ("nan", "inf", "-inf"):
        return float(value)
    if float in choices and type(value) is int:
        return float(value)
    if type(value) not in choices:
        names = " or ".join("null" if choice is types.NoneType else choice.__name__ for choice in choices)
        raise ResultFormatError(f"{where}: {value!r} is not {names}")
    return value


def to_csv(rows: Sequence[Row]) -> str:
    """The rows as comma-separated values under one header line; what was not measured is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ROW_KEYS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    return text.getvalue()


def load(path: Path) -> Results:
    """Reads and validates a result file. Raises ResultFormatError, or OSError when it cannot be read."""
    return from_json(path.read_text(encoding="utf-8"), origin=str(path))


def save(results: Results, path: Path) -> None:
    """Writes a result file atomically; makes its folder when needed."""
    write_atomically(path, to_json(results))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes next to `path` and renames into place: a reader sees the old content or the new, no mixture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
