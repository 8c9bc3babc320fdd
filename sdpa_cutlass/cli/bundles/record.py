"""bundle.json as values: how a result came about.

problem          name of a suite's problem, such as `mission/b1_h8_s512_d64`
dtype, device    `f16` or `bf16`; `cuda` or `cpu`
seed, repeats    of the inputs; of the timed calls at most
command          what measured it, as words
source           name and SHA-256 of the result file that it was taken from; null: measured for the bundle
kernel           that this library ran
library          the SHA-256 of the library's file; null where another process measured
unit             path of the generated unit; or null, and `no_unit` says why
inputs, outputs  SHA-256 of the bytes of q, k, v and of O and LSE; null where another process measured
samples_us       provider → raw times, one a replay (timing.py); empty where only medians were kept
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from sdpa_cutlass.cli.bundles.archive import BundleError

FORMAT = 1
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The keys of bundle.json."""

    problem: str
    dtype: str
    device: str
    seed: int
    repeats: int | None
    command: list[str]
    source: dict[str, str] | None
    kernel: str
    library: str | None
    unit: str | None
    no_unit: str | None
    inputs: dict[str, str] | None
    outputs: dict[str, str] | None
    samples_us: dict[str, list[float]]


def to_json(record: Record) -> bytes:
    """The text of bundle.json, keys in the order above."""
    document = {"format": FORMAT, **dataclasses.asdict(record)}
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def from_json(data: bytes, origin: str) -> Record:
    """Parses and checks bundle.json. Raises BundleError."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{origin}: bundle.json is not JSON: {str(error)[:200]}") from error
    wanted = typing.get_type_hints(Record)
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise BundleError(f"{origin}: bundle.json is not of format {FORMAT}")
    if sorted(document) != sorted(wanted):
        raise BundleError(f"{origin}: bundle.json must have exactly the keys format, {', '.join(wanted)}")
    for key, kind in wanted.items():
        if not _is(document[key], kind):
            raise BundleError(f"{origin}: bundle.json: {key} is {str(document[key])[:80]!r}: not {kind}")
    found = Record(**document)
    for key, allowed in (("dtype", ("f16", "bf16")), ("device", ("cuda", "cpu"))):
        if document[key] not in allowed:
            raise BundleError(
                f"{origin}: bundle.json: {key} is {document[key]!r}, not {' or '.join(allowed)}"
            )
    digests: Mapping[str, str] = {**(found.inputs or {}), **(found.outputs or {})}
    for name, text in digests.items():
        if not _HEX.fullmatch(text):
            raise BundleError(f"{origin}: bundle.json: the digest of {name[:40]} is no SHA-256")
    if found.repeats is not None and found.repeats < 1:
        raise BundleError(f"{origin}: bundle.json: repeats is {found.repeats}; allowed is 1 or more")
    return found


def _is(value: Any, kind: Any) -> bool:
    """Whether a JSON value has the type of a field."""
    if isinstance(kind, types.UnionType):
        return any(_is(value, one) for one in typing.get_args(kind))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_is(one, arguments[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(one, arguments[1]) for one in value.values())
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind
