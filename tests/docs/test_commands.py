"""The commands that documents print exist and take what is handed to them. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from generator.__main__ import _parser as generator_parser
from sdpa_cutlass.cli import make_parser

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
CODE = re.compile(r"```.*?\n(.*?)```|((?:^ {4}.*\n)+)|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\s*(?:\$ )?(?:\w+=\S+ )*(?:\S*/)?(python -m|make) (\S+)(.*)$")
PARSERS = {"sdpa_cutlass": make_parser, "generator": generator_parser}


def commands(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """("python -m" or "make", module or target, what follows) of code, in lines and within a sentence."""
    for found in CODE.finditer(text):
        for line in (found[1] or found[2] or found[3]).splitlines():
            command = COMMAND.match(line)
            if command:
                yield command[1], command[2], shlex.split(command[3], comments=True)


def wrong_with(module: str, words: list[str]) -> str | None:
    """What is not as the document says; None where all is."""
    if module in PARSERS:
        parser = PARSERS[module]()
        if module == "sdpa_cutlass" and len(words) < 2:  # a command that is mentioned
            return None if not words or f" {words[0]} " in parser.format_help() else "no such command"
        try:
            parser.parse_args(words)
        except SystemExit:
            return "does not parse"
        return None
    if module == "pytest":
        gone = [word for word in words if word.startswith("tests") and not (ROOT / word).exists()]
        return f"not there: {gone}" if gone else None
    place = ROOT / module.replace(".", "/")
    files = [*place.rglob("*.py")] if (place / "__main__.py").is_file() else [place.with_suffix(".py")]
    if not files[0].is_file():
        return "no such module"
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    options = [word.strip("[]") for word in words if word.strip("[]").startswith("--")]
    unknown = [option for option in options if f'"{option}"' not in source]
    return f"no option {unknown}" if unknown else None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_exist_and_parse(document: Path) -> None:
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    wrong = []
    for kind, name, words in commands(document.read_text(encoding="utf-8")):
        if kind == "make":
            names = [word for word in (name, *words) if re.fullmatch(r"[a-z-]+", word)]
            if not set(names) <= set(targets[0].split()):
                wrong.append(("make", *names))
        elif reason := wrong_with(name, words):
            wrong.append((name, *words, reason))
    assert wrong == []


def test_every_kind_is_found() -> None:
    found = [one for path in DOCUMENTS for one in commands(path.read_text(encoding="utf-8"))]
    assert len(found) > 100
    assert {name for _, name, _ in found} >= {*PARSERS, "pytest", "benchmarks.models", "docs", "test"}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("sdpa_cutlass", ["benches"]),
        ("sdpa_cutlass", ["bench", "--suites", "long"]),
        ("generator", ["--explains", "x"]),
        ("benchmarks.nothing", []),
        ("benchmarks.models", ["--tiny"]),
        ("pytest", ["tests/gone.py"]),
    ],
)
def test_what_is_wrong_is_found(module: str, words: list[str]) -> None:
    assert wrong_with(module, words)
