"""One interactive page of results: a static HTML file that needs no server and loads nothing.

    python -m benchmarks.documents --page FILE.html        # from all committed result files

The page is explore.html next to this file, with the rows of the result files put in as JSON. Filters choose
card, dtype, head_dim, mask, causal and suite; a plot and a table show the same rows, and each of their points
and cells says kernel, error and status. packaging/site_hooks.py adds it to the site. What it shows is what
the files hold: nothing is computed here, and in the page ratios alone.

Rows are arrays (COLUMNS), with strings as numbers of one list, so that a thousand problems stay below a
megabyte. Suites of wall time are left out: their times are not a GPU's.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdpa_cutlass.cli import OK, CommandError, results, wall_tables
from sdpa_cutlass.cli.results import Results, Row

TEMPLATE = Path(__file__).with_name("explore.html")
PLACE = "/* data */"
RESULTS = Path("benchmarks", "results")
FORMAT = 1
STRINGS = ("suite", "dtype", "alignment", "mask", "provider", "kernel", "status")
NUMBERS = (
    "batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim", "causal", "p_dropout",
    "gpu_us", "gpu_us_spread", "floor_us", "tflops", "max_err_out", "bound_out", "max_err_lse",
)  # fmt: skip
COLUMNS = ("file", *STRINGS, *NUMBERS)
KEPT = ("gpu", "driver", "cuda", "torch", "date")  # of a file's env


def committed(root: Path) -> dict[str, Results]:
    """The result files of a checkout that may be published, by their names."""
    found = {path.name: results.load(path) for path in sorted((root / RESULTS).glob("*.json"))}
    return {name: one for name, one in found.items() if one.env.get("gpu") and not one.env.get("interrupted")}


def run(options: argparse.Namespace) -> int:
    """Runs `--page FILE`; returns the exit status. Raises CommandError for what the user can put right."""
    files = committed(options.readme.parent)
    if not files:
        raise CommandError(f"no result file in {options.readme.parent / RESULTS}; run this in a checkout")
    try:
        results.write_atomically(options.page, page(files))
    except OSError as error:
        raise CommandError(f"cannot write {options.page}: {error.strerror or error}") from error
    print(f"{options.page}: written, {len(files)} files")
    return OK


def page(files: Mapping[str, Results]) -> str:
    """The HTML of the page that shows `files`, by their names."""
    template = TEMPLATE.read_text(encoding="utf-8")
    if template.count(PLACE) != 1:
        raise ValueError(f"{TEMPLATE} must have {PLACE} once")
    text = json.dumps(data(files), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # In a script element "</" and "<!--" would end or change it.
    return template.replace(PLACE, text.replace("<", "\\u003c"))


def data(files: Mapping[str, Results]) -> dict[str, Any]:
    """What the page gets: the files' machines, the list of strings, and the rows."""
    strings: dict[str | None, int] = {}
    rows = [
        _row(number, row, strings)
        for number, found in enumerate(files.values())
        for row in found.rows
        if row.suite != wall_tables.SUITE
    ]
    return {
        "format": FORMAT,
        "columns": COLUMNS,
        "strings": list(strings),
        "isString": [name in STRINGS for name in COLUMNS],
        "files": [{"name": name, **_machine(found)} for name, found in files.items()],
        "rows": rows,
    }


def _machine(found: Results) -> dict[str, Any]:
    library = found.env.get("library") or {}
    return {key: found.env.get(key) for key in KEPT} | {"library": str(library.get("digest"))[:12]}


def _row(file: int, row: Row, strings: dict[str | None, int]) -> Sequence[Any]:
    texts = [strings.setdefault(getattr(row, name), len(strings)) for name in STRINGS]
    return [file, *texts, *(_number(getattr(row, name)) for name in NUMBERS)]


def _number(value: float | bool | None) -> float | int | None:
    """JSON has no NaN: what is none is null, and the row's status says why."""
    if isinstance(value, bool):
        return int(value)
    return None if value is None or not math.isfinite(value) else value
