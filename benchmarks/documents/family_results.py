"""Result files of every command that times kernels, as rows of the one format (cli/results.py).

`benchmarks.quantised` and `benchmarks.backward` write files of their own, beside errors and both directions.
What this library's kernels took there becomes rows of the suites `quantised` and `backward`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from sdpa_cutlass.cli import results
from sdpa_cutlass.cli.results import ResultFormatError, Results, Row
from sdpa_cutlass.library.registry import Precision

_DTYPES = {"float16": "f16", "bfloat16": "bf16"}


def from_json(text: str, origin: str) -> Results:
    """The rows of a file of any of these commands. Raises ResultFormatError, which names `origin`."""
    try:
        record = json.loads(text)
    except ValueError:
        record = None
    try:
        if isinstance(record, dict) and "times" in record:
            env = record.get("env") or {"gpu": record["gpu"]}
            return Results(env, [_quantised(row) for row in record["times"] if _is_quantised(row)])
        if isinstance(record, dict) and any("milliseconds" in row for row in record.get("rows", ())):
            shaped = (
                row for row in record["rows"] if "shape" in row
            )  # not those of benchmarks.backward_suites
            return Results(record["env"], [one for row in shaped for one in _backward(row)])
    except (KeyError, TypeError) as error:
        raise ResultFormatError(f"{origin}: {error!r}") from error
    return results.from_json(text, origin=origin)


def _is_quantised(row: Mapping[str, Any]) -> bool:
    return row["provider"] in {precision.value for precision in Precision} and "gpu_us" in row


def _quantised(row: Mapping[str, Any]) -> Row:
    sizes = _sizes("quantised", row, row["heads_kv"], row["dtype"])
    return Row(**sizes, kernel=row["kernel"], gpu_us=row["gpu_us"], tflops=row["tflops"])


def _backward(row: Mapping[str, Any]) -> Iterator[Row]:
    """The backward alone, by each kernel that was timed."""
    shape = row["shape"]
    sizes = _sizes("backward", shape, shape["heads"], _DTYPES[shape["dtype"]])
    for name, rounds in row["milliseconds"].items():
        if name == "ours":
            yield Row(**sizes, kernel=row["kernel"], gpu_us=1e3 * statistics.median(rounds["backward"]))
        elif name.startswith("fmha_bwd"):  # of `--kernels`
            yield Row(**sizes, kernel=name, gpu_us=1e3 * statistics.median(rounds))


def _sizes(suite: str, row: Mapping[str, Any], heads_kv: int, dtype: str) -> dict[str, Any]:
    return {
        "suite": suite,
        "batch": row["batch"],
        "num_heads_q": row["heads"],
        "num_heads_kv": heads_kv,
        "seqlen_q": row["seqlen"],
        "seqlen_k": row["seqlen"],
        "head_dim": row["head_dim"],
        "dtype": dtype,
        "causal": row["causal"],
        "mask": "none",
        "p_dropout": 0.0,
        "visible": 1.0,
        "provider": "fused",
    }
