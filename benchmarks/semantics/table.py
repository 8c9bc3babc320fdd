"""Saved answers → the tables of docs/edge-cases.md, between the markers

    <!-- semantics: FOLDER -->
    (made text)
    <!-- end semantics -->

FOLDER, relative to the document, holds what `python -m benchmarks.semantics --json` wrote, one file a
machine; each gives a column for every backend of torch. What this library promises and what FA2 documents
come from the cases themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.semantics.backends import OURS
from benchmarks.semantics.cases import TOPICS
from benchmarks.semantics.outcomes import EdgeCase

FORMAT = 1
BLOCK = re.compile(r"<!-- semantics: (\S+) -->\n(?:.*\n)*?<!-- end semantics -->")
END = "<!-- end semantics -->"
TITLES = {"math": "math", "flash": "flash", "efficient": "mem-efficient", "cudnn": "cuDNN"}
MISSING = "?"


def cell(words: Mapping[str, str]) -> str:
    """Regions that agree are said once: `right`, or `the row: 0; others: right`."""
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{region}: {text}" for region, text in words.items())


def keeps_promise(case: EdgeCase, words: Mapping[str, str]) -> bool:
    """Whether this library's answer is what the case promises; "a or b" allows both."""
    if set(words) != set(case.ours):
        return list(case.ours.values()) == list(words.values()) == ["refused"]
    return all(words[region] in promised.split(" or ") for region, promised in case.ours.items())


def remake(text: str, document: Path) -> str:
    """The document's text with the tables made again. Raises ValueError where there is no block."""
    found = BLOCK.search(text)
    if found is None:
        raise ValueError(f"{document} has no block between `<!-- semantics: FOLDER -->` and `{END}`")
    files = sorted((document.parent / found[1]).glob("*.json"))
    block = f"<!-- semantics: {found[1]} -->\n{tables(files)}\n{END}"
    return text[: found.start()] + block + text[found.end() :]


def tables(paths: Sequence[Path]) -> str:
    """One table for each topic."""
    documents = [_load(path) for path in paths]
    columns = [(document, backend) for document in documents for backend in _backends(document)]
    where = [f"- {_machine(document['env'])}" for document in documents]
    headers = [
        "case",
        "what",
        "this library",
        *(f"{document['env']['device']}: {TITLES[backend]}" for document, backend in columns),
        "FA2",
    ]
    parts = ["Measured:", *where]
    for topic, cases in TOPICS.items():
        parts += ["", f"### {topic}", "", _line(headers), "|" + "---|" * len(headers)]
        for case in cases:
            measured = [_answer(document, case, backend) for document, backend in columns]
            parts.append(_line([f"`{case.name}`", case.what, cell(case.ours), *measured, case.fa2 or "–"]))
    return "\n".join(parts)


def _answer(document: Mapping[str, Any], case: EdgeCase, backend: str) -> str:
    outcome = document["outcomes"].get(case.name, {}).get(backend)
    return MISSING if outcome is None else cell(outcome["words"])


def _backends(document: Mapping[str, Any]) -> list[str]:
    names = {backend for outcome in document["outcomes"].values() for backend in outcome}
    return [name for name in TITLES if name in names and name != OURS]


def _machine(env: Mapping[str, Any]) -> str:
    parts = [
        f"{env['device']}: torch {env['torch']}",
        env.get("gpu"),
        f"driver {env['driver']}" if env.get("driver") else None,
        f"cuDNN {env['cudnn']}" if env.get("cudnn") else None,
        str(env["date"])[:10],
    ]
    return ", ".join(part for part in parts if part)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


def _load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if document.get("format") != FORMAT:
        raise ValueError(f"{path} is not of format {FORMAT}")
    return document
