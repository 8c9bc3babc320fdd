"""The report as JSON and as Markdown. `python -m tests.gpu_report` writes both."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from sdpa_cutlass.cli.environment import gpu_state
from sdpa_cutlass.errors import DriverError
from sdpa_cutlass.library.abi import Library
from sdpa_cutlass.library.registry import KernelInfo
from tests.gpu_report.parts import FAILED, Outcome, as_json

SCHEMA = 1


def machine(device: str, library: Library, rows: Sequence[KernelInfo]) -> dict[str, Any]:
    """What was checked, and on what. Raises DriverError when torch finds no GPU for device "cuda"."""
    if device == "cuda" and not torch.cuda.is_available():
        raise DriverError("torch finds no GPU; --device cpu runs the parts that need none")
    build = library.build
    facts: dict[str, Any] = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": device,
        "library": {
            "version": build.version,
            "target": build.target.value,
            "space": build.space,
            "digest": build.digest,
            "archs": build.archs,
            "cuda": build.cuda_runtime_version,
            "cutlass": build.cutlass_version,
            "kernels": len(rows),
        },
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["driver"] = gpu_state().get("driver")
    return facts


def is_clean(outcomes: Sequence[Outcome]) -> bool:
    return bool(outcomes) and all(outcome.verdict != FAILED for outcome in outcomes)


def to_json(facts: dict[str, Any], options: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    content = {
        "schema": SCHEMA,
        "clean": is_clean(outcomes),
        "machine": facts,
        "options": options,
        "parts": [as_json(outcome) for outcome in outcomes],
    }
    return json.dumps(_finite(content), indent=1) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def to_markdown(facts: dict[str, Any], options: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """One table, then the exceptions and failures in full."""
    library = facts["library"]
    where = ", ".join(facts.get("gpus", ["the host library"]))
    driver = f", driver {facts['driver']}" if facts.get("driver") else ""
    lines = [
        f"# Report: {'clean' if is_clean(outcomes) else 'NOT CLEAN'}",
        "",
        f"{where}{driver}, torch {facts['torch']}, library {library['version']} ({library['space']}, "
        f"{library['digest'][:12]}), {library['kernels']} kernels, {facts['date']}. "
        f"Made by `python -m tests.gpu_report`; options: {_options(options)}.",
        "",
        "| part | verdict | numbers | seeds | s |",
        "|---|---|---|---|---:|",
    ]
    for outcome in outcomes:
        numbers = [f"{value} {name}" for name, value in outcome.numbers.items()]
        numbers += [f"{name} {value:.3g}" for name, value in outcome.largest.items()]
        lines.append(
            f"| **{outcome.name}**: {outcome.what} | {outcome.verdict} | {', '.join(numbers)} | "
            f"{_seeds(outcome.seeds)} | {outcome.seconds:.0f} |"
        )
    for outcome in outcomes:
        if outcome.notes:
            lines += ["", f"**{outcome.name}**", "", *(f"- {note}" for note in outcome.notes)]
        if outcome.failures:
            lines += ["", f"**{outcome.name}, failures**", "", "```", *outcome.failures, "```"]
    return "\n".join(lines) + "\n"


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _seeds(seeds: Sequence[int]) -> str:
    if not seeds:
        return ""
    return str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]}–{seeds[-1]}"
