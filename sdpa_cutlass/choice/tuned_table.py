"""Tuned tables: for one GPU model, which kernel was measured to be the fastest where.

A row says: at this *bucket* this kernel won, in so many nanoseconds, with a right result, ahead of that one.
A bucket is what of a problem decides between kernels. Four of its fields must agree for a row to apply:
    dtype, causal
    head_dim   of the kernels that serve the problem (72 is served by general kernels of 80, say)
    kind       "plain", or what general kernels are needed for: bool, bias16 or bias32 (the mask's element),
               dropout, lengths, joined by "+"
and four make a distance, in octaves (factors of two): seqlen_q, seqlen_k, rows = batch · num_heads_q ·
seqlen_q (how many CTAs there are), and, with less weight, gqa = num_heads_q / num_heads_kv. Beyond
ENOUGH_ROWS and ENOUGH_KEYS a GPU is full and a loop long, and choices change no more, so more count as that
many. A problem takes the nearest row within MAX_DISTANCE, and none otherwise.

This file holds the record, its JSON and every check of it; tuned_lookup.py finds and reads files. Nothing in
a table is trusted: names follow patterns, numbers are integers within bounds, unknown keys are refused, and
a row can only ever name a kernel that the library has and that select.py finds legal.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from ..library.device import DeviceInfo
from ..library.registry import Family, KernelInfo
from ..problem import ATTENTION_DTYPES, DType, MaskType, Problem

FORMAT = 1
MAX_BYTES = 4 * 2**20  # of a file
MAX_ROWS = 8192
MAX_DISTANCE = 1.25  # octaves
ENOUGH_ROWS = 2**18
ENOUGH_KEYS = 2**14
_GQA_WEIGHT = 0.25
_MASK_KINDS = {MaskType.BOOL: "bool", MaskType.F16: "bias16", MaskType.BF16: "bias16", MaskType.F32: "bias32"}
_PLAIN = "plain"
CHECK_PASSED = "ok"

_TEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ().,/+_-]{0,79}")
_KERNEL = re.compile(r"[a-z][a-z0-9_]{0,119}")
_DIGEST = re.compile(r"[0-9a-f]{16,64}")
_DATE = re.compile(r"20[0-9]{2}-[01][0-9]-[0-3][0-9]")
_LARGEST = 2**40
_Point = tuple[float, float, float, float]


class TunedTableError(ValueError):
    """A file that is no tuned table; the message says where and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Where something was measured; see the head of this file."""

    dtype: DType
    head_dim: int
    kind: str
    causal: bool
    gqa: int
    rows: int
    seqlen_q: int
    seqlen_k: int

    @property
    def key(self) -> tuple[DType, int, str, bool]:
        """What must agree."""
        return self.dtype, self.head_dim, self.kind, self.causal

    @property
    def point(self) -> _Point:
        """What makes the distance."""
        return (
            math.log2(min(self.seqlen_q, ENOUGH_KEYS)),
            math.log2(min(self.seqlen_k, ENOUGH_KEYS)),
            math.log2(min(self.rows, ENOUGH_ROWS)),
            _GQA_WEIGHT * math.log2(self.gqa),
        )

    def __str__(self) -> str:
        text = f"{self.dtype.value} d{self.head_dim} {self.kind}{' causal' if self.causal else ''}"
        text += f" {self.rows}x{self.seqlen_k}"
        if self.seqlen_q != self.seqlen_k:
            text += f" seqlen_q {self.seqlen_q}"
        return text + (f" gqa {self.gqa}" if self.gqa > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedRow:
    """One choice. Times are GPU nanoseconds of a call; `max_error_nano` is its output's largest error · 1e9.

    `check` is the outcome of the numerics rule in the run that timed the kernel; only "ok" is accepted.
    Without a `runner_up`, the kernel was the only one; its `runner_up_ns` is 0 then.
    """

    bucket: Bucket
    kernel: str
    gpu_ns: int
    check: str
    max_error_nano: int
    runner_up: str | None
    runner_up_ns: int

    @property
    def ratio(self) -> float | None:
        """The runner-up's time over this kernel's."""
        return self.runner_up_ns / self.gpu_ns if self.runner_up else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTable:
    """All choices for one GPU model, and what they were measured with."""

    gpu: str
    compute_capability: tuple[int, int]
    sms: int
    library: str  # version
    digest: str  # of the library that was measured
    driver: str
    torch: str
    date: str
    rows: tuple[TunedRow, ...]


class HeadDims:
    """The head dimensions that a library's fused kernels serve."""

    def __init__(self, kernels: Iterable[KernelInfo]) -> None:
        fused = [kernel for kernel in kernels if kernel.serves(Family.FMHA_FWD)]
        self.plain = frozenset(kernel.head_dim for kernel in fused if not kernel.is_general)
        self.general = sorted({kernel.head_dim for kernel in fused if kernel.is_general})


def bucket_of(problem: Problem, head_dims: HeadDims) -> Bucket | None:
    """The bucket of `problem`, which may be empty; None when no kernel serves its head dimensions.

    None for windows and sinks too: no row tells of them. A plain problem with a head_dim that has no plain
    kernels runs in general ones, as if it had lengths.
    """
    if problem.window is not None or problem.has_sinks:
        return None
    widest = max(problem.head_dim, problem.head_dim_v)
    parts = []
    if problem.mask is not None:
        parts.append(_MASK_KINDS[problem.mask])
    if problem.has_dropout:
        parts.append("dropout")
    if problem.has_lengths:
        parts.append("lengths")
    head_dim: int | None = widest
    if parts or problem.head_dim not in head_dims.plain or problem.head_dim_v != problem.head_dim:
        head_dim = next((size for size in head_dims.general if size >= widest), None)
        parts = parts or ["lengths"]
    if head_dim is None:
        return None
    return Bucket(
        dtype=problem.dtype,
        head_dim=head_dim,
        kind="+".join(parts) or _PLAIN,
        causal=problem.is_causal,
        gqa=max(problem.num_heads_q // max(problem.num_heads_kv, 1), 1),
        rows=max(problem.batch * problem.num_heads_q * problem.seqlen_q, 1),
        seqlen_q=max(problem.seqlen_q, 1),
        seqlen_k=max(problem.seqlen_k, 1),
    )


class Nearest:
    """Answers which row of a table is nearest to a bucket."""

    def __init__(self, table: TunedTable) -> None:
        self._rows: dict[tuple[DType, int, str, bool], list[tuple[_Point, TunedRow]]] = {}
        for row in table.rows:
            self._rows.setdefault(row.bucket.key, []).append((row.bucket.point, row))

    def __call__(self, bucket: Bucket) -> tuple[TunedRow, float] | None:
        """The nearest row and how many octaves away it was measured, or None beyond MAX_DISTANCE."""
        here = bucket.point
        distances = ((math.dist(here, point), row) for point, row in self._rows.get(bucket.key, ()))
        distance, row = min(distances, key=lambda pair: pair[0], default=(math.inf, None))
        return None if row is None or distance > MAX_DISTANCE else (row, distance)


def misfit(table: TunedTable, kernels: Iterable[KernelInfo], device: DeviceInfo | None) -> str | None:
    """Why `table` is not for a library with `kernels` on `device` (None: on any), or None when it is."""
    if device is not None:
        measured = (table.gpu, table.compute_capability, table.sms)
        here = (device.name, device.compute_capability, device.sms)
        if measured != here:
            return f"it was measured on {_gpu_text(*measured)}, and this is {_gpu_text(*here)}"
    rows = {kernel.name: kernel for kernel in kernels}
    for row in table.rows:
        kernel = rows.get(row.kernel)
        if kernel is None:
            return f"the library has no kernel {row.kernel}"
        reason = _unsuited(kernel, row.bucket)
        if reason:
            return f"{row.kernel} {reason}, but is named for {row.bucket}"
    return None


def _gpu_text(name: str, capability: tuple[int, int], sms: int) -> str:
    return f"{name} ({capability[0]}.{capability[1]}, {sms} SMs)"


def _unsuited(kernel: KernelInfo, bucket: Bucket) -> str | None:
    """What of its registry row keeps `kernel` from running the problems of `bucket`."""
    parts = bucket.kind.split("+")
    if not kernel.serves(Family.FMHA_FWD):
        return "is no fused kernel"
    if kernel.dtype is not bucket.dtype:
        return f"is for {kernel.dtype.value}"
    if kernel.has_dropout != ("dropout" in parts):
        return "applies dropout" if kernel.has_dropout else "applies no dropout"
    if kernel.is_split and any(part.startswith(("bool", "bias")) for part in parts):
        return "takes no mask"
    if kernel.is_unbiased and any(part.startswith("bias") for part in parts):
        return "takes no bias"
    if kernel.is_general:
        return None if kernel.head_dim >= bucket.head_dim else f"has head_dim {kernel.head_dim}"
    if kernel.head_dim != bucket.head_dim:
        return f"has head_dim {kernel.head_dim}"
    if bucket.kind != _PLAIN:
        return "is a plain kernel"
    return None if kernel.is_causal == bucket.causal else "is causal or not"


# ---- JSON ----


def to_json(table: TunedTable) -> str:
    """The text of a table's file: keys in a fixed order, one row a line."""
    head: dict[str, Any] = {"format": FORMAT, **asdict(table)}
    del head["rows"]
    rows = ",\n".join(f"  {json.dumps(_row_record(row))}" for row in table.rows)
    text = json.dumps(head, indent=1, ensure_ascii=True)[:-2]  # without "\n}"
    return f'{text},\n "rows": [\n{rows}\n ]\n}}\n'


def _row_record(row: TunedRow) -> dict[str, Any]:
    record = {**bucket_record(row.bucket), **asdict(row)}
    del record["bucket"]
    return record


def bucket_record(bucket: Bucket) -> dict[str, Any]:
    """A bucket as JSON has it."""
    return asdict(bucket) | {"dtype": bucket.dtype.value}


def from_json(text: str) -> TunedTable:
    """Parses and checks the text of a table's file. Raises TunedTableError."""
    try:
        document = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise TunedTableError(f"not JSON: {str(error)[:200]}") from None
    head = _record(document, "the table", {*TunedTable.__dataclass_fields__, "format"})
    if type(head["format"]) is not int or head["format"] != FORMAT:
        raise TunedTableError(f"format is {head['format']!r:.40}; this version reads {FORMAT}")
    capability, rows = head["compute_capability"], head["rows"]
    if not isinstance(capability, list) or len(capability) != 2:
        raise TunedTableError(f"compute_capability is {capability!r:.40}, not two integers")
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_ROWS:
        raise TunedTableError(f"rows is not a list of 1 to {MAX_ROWS} rows")
    parsed = tuple(_parse_row(row, f"row {index}") for index, row in enumerate(rows))
    buckets = [row.bucket for row in parsed]
    if len(set(buckets)) != len(buckets):
        raise TunedTableError("two rows are for the same bucket")
    return TunedTable(
        gpu=_name(head, "gpu", _TEXT),
        compute_capability=(
            _number(capability[0], "compute_capability", 1, 99),
            _number(capability[1], "compute_capability", 0, 9),
        ),
        sms=_integer(head, "sms", 1, 4096),
        library=_name(head, "library", _TEXT),
        digest=_name(head, "digest", _DIGEST),
        driver=_name(head, "driver", _TEXT),
        torch=_name(head, "torch", _TEXT),
        date=_name(head, "date", _DATE),
        rows=parsed,
    )


_BUCKET_KEYS = frozenset(Bucket.__dataclass_fields__)
_ROW_KEYS = _BUCKET_KEYS | (set(TunedRow.__dataclass_fields__) - {"bucket"})


def check_splits(record: Mapping[str, Any], where: str) -> None:
    """Older versions wrote a number of splits, always 1. Raises TunedTableError for any other."""
    value = record.get("num_splits", 1)
    if type(value) is not int or value != 1:
        raise TunedTableError(f"{where}: num_splits is {value!r:.40}; a row names no number of splits but 1")


def _parse_row(value: Any, where: str) -> TunedRow:
    row = _record(value, where, _ROW_KEYS, optional={"num_splits": 1})
    check_splits(row, where)
    if row["check"] != CHECK_PASSED:
        raise TunedTableError(f"{where}: check is {row['check']!r:.40}, not {CHECK_PASSED!r}")
    runner_up = None
    if row["runner_up"] is not None:
        runner_up = _name(row, "runner_up", _KERNEL, where)
    return TunedRow(
        bucket=_bucket(row, where),
        kernel=_name(row, "kernel", _KERNEL, where),
        gpu_ns=_integer(row, "gpu_ns", 1, _LARGEST, where),
        check=CHECK_PASSED,
        max_error_nano=_integer(row, "max_error_nano", 0, _LARGEST, where),
        runner_up=runner_up,
        runner_up_ns=_integer(
            row, "runner_up_ns", 1 if runner_up else 0, _LARGEST if runner_up else 0, where
        ),
    )


def parse_bucket(value: Any, where: str) -> Bucket:
    """A bucket from its JSON. Raises TunedTableError."""
    return _bucket(_record(value, where, _BUCKET_KEYS), where)


_DTYPES = {dtype.value: dtype for dtype in ATTENTION_DTYPES}


def _bucket(record: Mapping[str, Any], where: str) -> Bucket:
    """The bucket in a record that has its keys."""
    dtype, kind, causal = record["dtype"], record["kind"], record["causal"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise TunedTableError(f"{where}: dtype is {dtype!r:.40}, not one of {', '.join(_DTYPES)}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise TunedTableError(f"{where}: kind is {kind!r:.40}, not one of {', '.join(KINDS)}")
    if type(causal) is not bool:
        raise TunedTableError(f"{where}: causal is {causal!r:.40}, not true or false")
    return Bucket(
        dtype=_DTYPES[dtype],
        kind=kind,
        causal=causal,
        head_dim=_integer(record, "head_dim", 1, 4096, where),
        gqa=_integer(record, "gqa", 1, 2**20, where),
        rows=_integer(record, "rows", 1, _LARGEST, where),
        seqlen_q=_integer(record, "seqlen_q", 1, _LARGEST, where),
        seqlen_k=_integer(record, "seqlen_k", 1, _LARGEST, where),
    )


KINDS = tuple(
    "+".join(filter(None, parts)) or _PLAIN
    for parts in product(("", "bool", "bias16", "bias32"), ("", "dropout"), ("", "lengths"))
)
"""Every kind that bucket_of can name."""


def _record(
    value: Any, where: str, required: Set[str], optional: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`value`, if it is an object with the required keys and no others than these and the optional ones."""
    if not isinstance(value, dict):
        raise TunedTableError(f"{where} is not an object")
    found = {**(optional or {}), **value}
    missing, unknown = required - set(found), set(found) - required - set(optional or {})
    if missing or unknown:
        what = f"no {', '.join(sorted(missing))}" if missing else f"an unknown key {min(unknown)!r:.40}"
        raise TunedTableError(f"{where} has {what}")
    return found


def _integer(record: Mapping[str, Any], key: str, low: int, high: int, where: str = "the table") -> int:
    return _number(record[key], f"{where}: {key}", low, high)


def _number(value: Any, where: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise TunedTableError(f"{where} is {value!r:.40}, not an integer from {low} to {high}")
    return value


def _name(record: Mapping[str, Any], key: str, pattern: re.Pattern[str], where: str = "the table") -> str:
    value = record[key]
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise TunedTableError(f"{where}: {key} is {value!r:.60}, which does not match {pattern.pattern}")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number here")
