"""The journal of a sweep: raw measurements, one JSON object a line, only ever appended to.

    {"journal": 1, "env": {...}, "device": {...}, "seed": 0}           the first line
    {"kernel": {...}}                                                  a registry row, before its first use
    {"case": "...", "problem": {...}, "bucket": {...}, "measured": [{...}, ...]}

A line is written when its problem is done, so an interrupted sweep loses the problem at hand at most; a last
line that is torn is dropped. The newest line of a problem counts for each kernel that it measured. Registry
rows are kept so that the cost model can be asked again, by model.py, without the library.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sdpa_cutlass.choice.tuned_table import Bucket, bucket_record, check_splits, parse_bucket
from sdpa_cutlass.library.device import DeviceInfo
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Accuracy, Family, KernelInfo, Op, Takes
from sdpa_cutlass.problem import Causal, DType, MaskType, Problem

FORMAT = 1
OK = "ok"
NO_FAILURES = ("refused", "out of memory")  # these only say that a kernel does not serve here


class JournalError(ValueError):
    """A file that is no journal, or one of another sweep; the message names the file and the line."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One kernel at one problem. `status` is "ok", or begins with "wrong", "error" or one of NO_FAILURES."""

    kernel: str
    gpu_us: float | None = None
    gpu_us_spread: float | None = None
    max_err_out: float | None = None
    max_err_lse: float | None = None
    status: str = OK

    @property
    def has_failed(self) -> bool:
        """True when the kernel must not be selected anywhere."""
        return self.status != OK and not self.status.startswith(NO_FAILURES)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One problem and what was measured of it."""

    case: str
    problem: Problem
    bucket: Bucket
    measured: tuple[Measured, ...]


@dataclass(kw_only=True)
class Journal:
    """A sweep on one device with one library."""

    env: Mapping[str, Any]
    device: DeviceInfo
    seed: int
    kernels: dict[str, KernelInfo] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)  # by case

    def add(self, entry: Entry) -> None:
        """Adds what was measured; newer measurements of a problem and kernel replace older ones."""
        earlier = self.entries.get(entry.case)
        if earlier is not None:
            renewed = {measured.kernel for measured in entry.measured}
            kept = tuple(measured for measured in earlier.measured if measured.kernel not in renewed)
            entry = Entry(
                case=entry.case,
                problem=entry.problem,
                bucket=entry.bucket,
                measured=kept + entry.measured,
            )
        self.entries[entry.case] = entry

    def measured_kernels(self, case: str) -> set[str]:
        """The kernels that need not be measured at `case` again."""
        entry = self.entries.get(case)
        return {measured.kernel for measured in entry.measured} if entry is not None else set()

    @property
    def failures(self) -> dict[str, str]:
        """Kernel → where and how it failed first; such a kernel is not selected anywhere."""
        found: dict[str, str] = {}
        for entry in self.entries.values():
            for measured in entry.measured:
                if measured.has_failed:
                    found.setdefault(measured.kernel, f"{entry.case}: {measured.status}")
        return found


class Writer:
    """Appends to the file of `journal` and keeps `journal` in step. A new file gets its head at once."""

    def __init__(self, path: Path, journal: Journal, *, is_new: bool) -> None:
        self.journal = journal
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "x" if is_new else "a", encoding="utf-8")  # noqa: SIM115
        if is_new:
            device = {"name": journal.device.name, "target": journal.device.target.value}
            device |= {key: getattr(journal.device, key) for key in _DEVICE_KEYS}
            self._write({"journal": FORMAT, "env": dict(journal.env), "device": device, "seed": journal.seed})

    def add(self, entry: Entry, kernels: Iterable[KernelInfo]) -> None:
        """Appends `entry`; `kernels` are the registry rows of what it measured."""
        for kernel in kernels:
            if kernel.name not in self.journal.kernels:
                self._write({"kernel": _plain(asdict(kernel))})
                self.journal.kernels[kernel.name] = kernel
        self._write(
            {
                "case": entry.case,
                "problem": _plain(asdict(entry.problem)),
                "bucket": bucket_record(entry.bucket),
                "measured": [_plain(asdict(measured)) for measured in entry.measured],
            }
        )
        self.journal.add(entry)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


_DEVICE_KEYS = ("compute_capability", "sms", "mma_flops_per_clock", "l2_bytes", "dram_gbps")


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Enums as their values; numbers that are none, which JSON does not have, as null."""

    def value_of(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return getattr(value, "value", value)

    return {key: value_of(value) for key, value in record.items()}


def read(path: Path) -> Journal:
    """Reads a journal, but for a torn last line. Raises JournalError, or OSError when it cannot be read."""
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line's end is torn, or nothing
    journal: Journal | None = None
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if journal is None:
                journal = _parse_head(record)
            elif "kernel" in record:
                kernel = _parse_kernel(record["kernel"])
                journal.kernels[kernel.name] = kernel
            else:
                journal.add(_parse_entry(record))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise JournalError(
                f"{path}: line {number}: {type(error).__name__}: {str(error)[:200]}"
            ) from error
    if journal is None:
        raise JournalError(f"{path}: it is empty, or its first line is torn; remove it")
    unknown = {m.kernel for entry in journal.entries.values() for m in entry.measured} - set(journal.kernels)
    if unknown:
        raise JournalError(f"{path}: measures {min(unknown)} without its registry row")
    return journal


def cut_torn_line(path: Path) -> None:
    """Removes what follows the last complete line, so that more can be appended."""
    with open(path, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _parse_head(record: Any) -> Journal:
    if record["journal"] != FORMAT:
        raise ValueError(f"journal is {record['journal']!r:.40}; this version reads {FORMAT}")
    device = record["device"]
    major, minor = device["compute_capability"]
    info = DeviceInfo(
        target=Target(device["target"]),
        index=0,
        name=str(device["name"]),
        compute_capability=(int(major), int(minor)),
        sms=int(device["sms"]),
        mma_flops_per_clock=int(device["mma_flops_per_clock"]),
        l2_bytes=int(device.get("l2_bytes", 0)),  # journals before 2026-11-24 have neither
        dram_gbps=float(device.get("dram_gbps", 0)),
    )
    if not isinstance(record["env"], dict):
        raise ValueError("env is not an object")
    return Journal(env=record["env"], device=info, seed=int(record["seed"]))


def _parse_kernel(record: Mapping[str, Any]) -> KernelInfo:
    """A registry row, also as journals had them whose rows said with flags what they take."""
    takes = Takes(record["takes"]) if "takes" in record else _takes_of_flags(record)
    details = record.get("details") or [(name, record.get(name, 0)) for name in _OLD_DETAILS]
    kernel = KernelInfo(
        takes=takes,
        details=tuple((str(name), int(value)) for name, value in details),
        family=Family(record["family"]),
        dtype=DType(record["dtype"]),
        name=str(record["name"]),
        index=int(record["index"]),
        op=Op(record.get("op", Op.FORWARD.value)),
        accuracy=Accuracy(record.get("accuracy", Accuracy.EXACT.value)),
        arch=int(record["arch"]),
        code=str(record.get("code", record["arch"])),
        head_dim=int(record["head_dim"]),
        smem_bytes=int(record["smem_bytes"]),
        ctas_per_sm=int(record["ctas_per_sm"]),
    )
    if not kernel.serves(Family.FMHA_FWD):
        raise ValueError(f"{kernel.name} is no fused kernel")
    return kernel


_OLD_DETAILS = ("block_m", "block_n", "stages", "warps", "kv_groups", "q_in_regs")


def _takes_of_flags(record: Mapping[str, Any]) -> Takes:
    found = Takes.DROPOUT if record.get("has_dropout") else Takes.UNDROPPED
    if not record.get("is_general"):
        return found | (Takes.CAUSAL if record["is_causal"] else Takes.FULL)
    found |= Takes.FULL | Takes.CAUSAL | Takes.LENGTHS | Takes.PACKED | Takes.SMALLER_HEAD_DIM
    if record.get("is_split"):
        return found | Takes.SPLITS
    found |= Takes.BOOL
    return found if record.get("is_unbiased") else found | Takes.BIAS16 | Takes.BIAS32


def _parse_entry(record: Mapping[str, Any]) -> Entry:
    raw = dict(record["problem"])
    raw["dtype"] = DType(raw["dtype"])
    raw["causal"] = Causal(raw["causal"]) if raw["causal"] is not None else None
    raw["mask"] = MaskType(raw["mask"]) if raw["mask"] is not None else None
    bucket = parse_bucket(record["bucket"], "bucket")
    for item in record["measured"]:
        check_splits(item, "measured")
        item.pop("num_splits", None)
    measured = [Measured(**item) for item in record["measured"]]
    return Entry(
        case=str(record["case"]),
        problem=Problem(**raw),
        bucket=bucket,
        measured=tuple(map(_checked, measured)),
    )


def _checked(measured: Measured) -> Measured:
    """`measured`, if its values have the types that the class promises."""
    for item in fields(measured):
        value = getattr(measured, item.name)
        wanted = {"kernel": str, "status": str}.get(item.name)
        if type(value) is not wanted if wanted else not isinstance(value, (float, int, type(None))):
            raise ValueError(f"{item.name} is {value!r:.40}")
    if measured.status == OK and not (measured.gpu_us and measured.gpu_us > 0):
        raise ValueError(f"{measured.kernel} is ok without a time")
    return measured


def same_sweep(journals: Sequence[Journal]) -> str | None:
    """Why these journals cannot be taken together, or None: all must be of one GPU model."""
    for other in journals[1:]:
        first, second = journals[0].device, other.device
        if (first.name, first.compute_capability, first.sms) != (
            second.name,
            second.compute_capability,
            second.sms,
        ):
            return f"one is of {first.name} with {first.sms} SMs, another of {second.name} with {second.sms}"
    return None
