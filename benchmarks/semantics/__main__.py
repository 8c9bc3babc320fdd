"""Asks every backend every edge case, saves the answers, and writes the tables of docs/edge-cases.md.

    python -m benchmarks.semantics --device cuda --json benchmarks/results/semantics/h200.json
    python -m benchmarks.semantics --markdown docs/edge-cases.md

Each backend runs in a process of its own, which is started again behind a case that kills it or leaves CUDA
unusable. Exit status 1 when this library does not keep a promise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.semantics import backends, table
from benchmarks.semantics.backends import BACKENDS, OURS, Outcome
from benchmarks.semantics.cases import CASES

CRASHES = {"": "crashes"}


def main() -> int:
    """Runs the command line."""
    options = _parser().parse_args()
    if options.worker:
        return _work(options.worker, options.device, options.cases)
    if options.markdown:
        text = options.markdown.read_text(encoding="utf-8")
        made = table.remake(text, options.markdown)
        options.markdown.write_text(made, encoding="utf-8")
        print(f"{options.markdown}: {'up to date' if made == text else 'written'}")
        return 0
    names = options.cases or list(CASES)
    device = options.device or _default_device()
    outcomes = {name: {} for name in names}  # type: dict[str, dict[str, Outcome]]
    for backend in BACKENDS[device]:
        for name, outcome in _ask_all(backend, device, names).items():
            outcomes[name][backend] = outcome
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(_to_json(_environment(device), outcomes), encoding="utf-8")
        print(f"wrote {options.json}")
    else:
        _show(outcomes)
    broken = [name for name in names if not table.keeps_promise(CASES[name], outcomes[name][OURS].words)]
    for name in broken:
        found = outcomes[name][OURS]
        print(f"promise not kept: {name}: {found.words} {found.reason}; promised: {dict(CASES[name].ours)}")
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.semantics", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="only these cases")
    parser.add_argument("--device", choices=tuple(BACKENDS), help="default: cuda where there is a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the answers")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="make the tables of this document again"
    )
    parser.add_argument("--worker", choices=(OURS, *backends.TORCH), help=argparse.SUPPRESS)
    return parser


def _work(backend: str, device: str, names: list[str]) -> int:
    """One backend, one line of JSON for each case."""
    for name in names:
        outcome = backends.ask(CASES[name], backend, device)
        print(json.dumps([name, dataclasses.asdict(outcome)]), flush=True)
        if outcome.is_fatal:
            return 1
    return 0


def _ask_all(backend: str, device: str, names: list[str]) -> dict[str, Outcome]:
    """One backend's outcomes, in as many processes as it takes."""
    found: dict[str, Outcome] = {}
    while len(found) < len(names):
        left = [name for name in names if name not in found]
        print(f"{backend}: {len(left)} cases", file=sys.stderr)
        command = [sys.executable, "-m", "benchmarks.semantics", "--worker", backend, "--device", device]
        done = subprocess.run([*command, *left], stdout=subprocess.PIPE, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        for name, outcome in lines:
            answer = Outcome(**outcome)
            found[name] = dataclasses.replace(answer, words=CRASHES) if answer.is_fatal else answer
        if done.returncode and not (lines and Outcome(**lines[-1][1]).is_fatal):
            dead = next(name for name in names if name not in found)
            found[dead] = Outcome(CRASHES, f"the process ended with status {done.returncode}")
    return found


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _environment(device: str) -> dict[str, Any]:
    import torch

    from sdpa_cutlass.cli import environment

    facts = environment.record(torch.device(device, 0) if device == "cuda" else torch.device(device))
    kept = ("gpu", "driver", "cuda", "cudnn", "torch", "library", "date", "platform")
    return {"device": device, **{name: facts.get(name) for name in kept}}


def _to_json(env: dict[str, Any], outcomes: dict[str, dict[str, Outcome]]) -> str:
    """The text of a file: one case a line, so that versions can be compared."""
    lines = []
    for name, by_backend in outcomes.items():
        answers = {backend: dataclasses.asdict(outcome) for backend, outcome in by_backend.items()}
        lines.append(f"  {json.dumps(name)}: {json.dumps(answers, ensure_ascii=False)}")
    head = f'{{"format": {table.FORMAT},\n"env": {json.dumps(env, indent=1)},\n"outcomes": {{\n'
    return head + ",\n".join(lines) + "\n}}\n"


def _show(outcomes: dict[str, dict[str, Outcome]]) -> None:
    for name, by_backend in outcomes.items():
        print(name)
        for backend, outcome in by_backend.items():
            print(f"    {backend:10} {table.cell(outcome.words)}  {outcome.reason}")


if __name__ == "__main__":
    sys.exit(main())
