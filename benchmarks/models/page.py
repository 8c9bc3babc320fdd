"""The tables of docs/models.md and docs/quantised.md, from committed result files of this package.

    python -m benchmarks.models.page [--check]

A page holds blocks between markers, each on a line of its own; FILE is relative to the page.

    <!-- models: KIND FILE ... -->
    (made text)
    <!-- end models -->

errors      every case in float16: errors of torch and of this library, calls, and what was passed on
quantised   every case with quantised calls in float16: errors at the outputs and of the worst head
times       every row with times; a file of a CPU has none
speedups    geometric means of torch's time over this library's, and the rows in which this library is slower
predicted   what the calls of a run should take on an L4, by the cost models; nothing of it is measured
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.documents import kernel_rows
from sdpa_cutlass.choice.cost.model import CLOCK_GHZ
from sdpa_cutlass.cli.cells import number
from sdpa_cutlass.cli.predictions import L4, Prediction, predict
from sdpa_cutlass.cli.results import Row
from sdpa_cutlass.cli.summary import tile

ROOT = Path(__file__).parents[2]
PAGES = ("docs/models.md", "docs/quantised.md")
SLOWER = 0.99
SLOW_GRAPH = 1.25
_BLOCK = re.compile(
    r"(?P<begin><!-- models: (?P<kind>\w+)(?P<files>(?: \S+)+) -->\n).*?(?P<end><!-- end models -->)",
    re.DOTALL,
)

Rows = Sequence[dict[str, Any]]


def errors(rows: Rows) -> Iterator[str]:
    """Relative L2 errors of the outputs."""
    yield "| model | task | torch | `enable()` | interface | calls served | passed on by the interface |"
    yield "|---|---|--:|--:|--:|--:|---|"
    for row in rows:
        if row["dtype"] != "f16" or row["mode"] != "eager":
            continue
        found = row["providers"]
        ours, interface = (found.get(name) for name in ("sdpa_cutlass", "interface"))
        left = (
            ""
            if interface is None
            else ", ".join(f"{n} × {why}" for why, n in interface["fallbacks"].items())
        )
        served = f"{row['served']} of {row['calls']}" if row["calls"] else "not seen"
        yield (
            f"| {row['model']} | {row['task']} | {_error(found['torch'])} | {_error(ours)} "
            f"| {_error(interface)} | {served} | {left or '–'} |"
        )


def _error(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "–"
    return f"{entry['l2']:.1e}" if entry["l2"] is not None else str(entry["status"])


def quantised(rows: Rows) -> Iterator[str]:
    """`allowed` is of the contract's line for every family of inputs."""
    yield "| model | task | precision | calls in 8 bits | exact | 8 bits | may be | 1 − cosine | worst head |"
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        if row["dtype"] != "f16" or not row["quantised"]:
            continue
        over = "" if row["heads_hold"] else f" (the contract says {row['contract_l2']:.1e})"
        yield (
            f"| {row['model']} | {row['task']} | `{row['precision']}` | {row['quantised']} of {row['calls']} "
            f"| {row['exact_l2']:.1e} | {row['l2']:.1e} | {row['allowed_l2']:.1e} "
            f"| {row['one_minus_cosine']:.1e} | {row['head_l2']:.1e}{over} |"
        )


def times(rows: Rows) -> Iterator[str]:
    """Milliseconds of a run."""
    yield "| model | task | mode | torch | this library | torch / this | attention's share, by torch |"
    yield "|---|---|---|--:|--:|--:|--:|"
    for row in rows:
        if row["dtype"] != "f16" or row["torch_ms"] is None:
            continue
        share = row["providers"]["torch"]["attention_share"]
        ours = "– | –" if row["ms"] is None else f"{row['ms']:.2f} | {row['torch_ms'] / row['ms']:.3f}"
        share = "–" if share is None else f"{share:.0%}"
        yield f"| {row['model']} | {row['task']} | {row['mode']} | {row['torch_ms']:.2f} | {ours} | {share} |"


def speedups(rows: Rows) -> Iterator[str]:
    """What attention cannot explain is left out in steps; the others have every row with both times."""
    yield f"| rows | count | torch / this library, geometric mean | below {SLOWER} |"
    yield "|---|--:|--:|---|"
    timed = [row for row in rows if row["dtype"] == "f16" and row["torch_ms"] and row["ms"]]
    eager = {(row["model"], row["task"]): row["torch_ms"] for row in timed if row["mode"] == "eager"}

    def is_slow_graph(row: dict[str, Any]) -> bool:
        alone = eager.get((row["model"], row["task"]))
        return row["mode"] == "graph" and alone is not None and row["torch_ms"] > SLOW_GRAPH * alone

    modes = list(dict.fromkeys(row["mode"] for row in timed))
    groups = {mode: [row for row in timed if row["mode"] == mode] for mode in modes}
    groups["all"] = timed
    slow = [_name(row) for row in timed if is_slow_graph(row)]
    usual = [row for row in timed if not is_slow_graph(row)]
    groups[f"without {'; '.join(slow)}: there torch takes over {SLOW_GRAPH} times its eager time"] = usual
    fused = [row for row in usual if row["by"] == "sdpa_cutlass"]
    groups["without those and without models that torch gives no fused attention"] = fused
    for name, group in groups.items():
        if group:
            ratios = [row["torch_ms"] / row["ms"] for row in group]
            slower = ", ".join(
                f"{_name(row)}: {ratio:.3f}"
                for row, ratio in zip(group, ratios, strict=True)
                if ratio < SLOWER
            )
            yield f"| {name} | {len(group)} | {statistics.geometric_mean(ratios):.3f} | {slower or 'none'} |"


def predicted(rows: Rows) -> Iterator[str]:
    """Microseconds of all calls of a run, at two clocks, with the kernels that take most of it first."""
    clocks = [f"predicted for an L4 at {clock} GHz, µs" for clock in (CLOCK_GHZ, f"{L4.boost_ghz:.2f}")]
    whole = "whole run, measured on the GPU below, µs"
    yield f"| model | task | calls | {' | '.join(clocks)} | tiles | {whole} |"
    yield "|---|---|--:|--:|--:|---|--:|"
    for row in rows:
        if row["dtype"] != "f16" or row["mode"] != "eager" or not row["problems"]:
            continue
        usual = at_boost = 0.0
        kernels: dict[str, float] = {}
        for problem in row["problems"]:
            found = _prediction(problem)
            time = problem["calls"] * found.microseconds
            usual += time
            at_boost += problem["calls"] * found.microseconds_at_boost
            name = tile(found.kernel.name)
            kernels[name] = kernels.get(name, 0.0) + time
        names = ", ".join(f"`{name}`" for name in sorted(kernels, key=lambda name: -kernels[name]))
        measured = None if row["ms"] is None else 1e3 * row["ms"]
        times = f"{number(usual)} | {number(at_boost)} | {names} | {number(measured)}"
        yield f"| {row['model']} | {row['task']} | {row['calls']} | {times} |"


def _prediction(problem: dict[str, Any]) -> Prediction:
    """Of one call as F.scaled_dot_product_attention gets it; a mask counts as if it hid no key block."""
    batch, heads, rows, head_dim = problem["query"]
    masks = {"": "none", "bool": "dense", "float16": "bias_f16", "float32": "bias_f32"}
    asked = Row(
        suite="models", batch=batch, num_heads_q=heads, num_heads_kv=problem["key"][1], seqlen_q=rows,
        seqlen_k=problem["key"][2], head_dim=head_dim, dtype="f16", causal=problem["is_causal"],
        mask=masks[problem["mask"].partition(" ")[0]], p_dropout=0.0, visible=1.0, provider="fused",
    )  # fmt: skip
    found = predict(kernel_rows.release(), asked, L4)
    if found is None:
        raise ValueError(f"no kernel for {problem}")
    return found


def _name(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['task']}, {row['mode']}"


KINDS = {
    "errors": errors,
    "quantised": quantised,
    "times": times,
    "speedups": speedups,
    "predicted": predicted,
}


def remade(text: str, folder: Path) -> str:
    """The page's text with every block made again."""

    def block(found: re.Match[str]) -> str:
        names = found["files"].split()
        files = [json.loads((folder / name).read_text(encoding="utf-8")) for name in names]
        lines = list(KINDS[found["kind"]]([row for file in files for row in file["rows"]]))
        machines = dict.fromkeys(_machine(file["env"]) for file in files)
        links = ", ".join(f"[{Path(name).name}]({name})" for name in names)
        lines += ["", f"Made by `python -m benchmarks.models.page` from {links}: {'; '.join(machines)}."]
        return found["begin"] + "\n".join(lines) + "\n" + found["end"]

    return _BLOCK.sub(block, text)


def _machine(env: dict[str, Any]) -> str:
    where = f"{env['gpu']}, driver {env['driver']}" if env["gpu"] else f"{env['cpu']}, the host library"
    return f"{where}, torch {env['torch']}, transformers {env['transformers']}, {env['date'][:10]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the pages, or says which are stale."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models.page", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when one is stale")
    check = parser.parse_args(arguments).check
    stale = 0
    for name in PAGES:
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        made = remade(text, page.parent)
        if made != text:
            stale += 1
            print(f"{name}: {'stale' if check else 'written'}")
            if not check:
                page.write_text(made, encoding="utf-8")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
