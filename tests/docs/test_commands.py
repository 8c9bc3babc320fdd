"""The commands that documents print exist and take what is handed to them; those that need no GPU are run.

Not run: builds, tests, what measures a GPU, and what needs files of the reader's own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
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


RUN = (  # as patterns of what stands behind "python -m"
    r"generator --(list|explain \w+\d\w+)",
    r"sdpa_cutlass (info|compare --(list|json)\b.*|compare --suite host .*|tune --list .*)",
    r"sdpa_cutlass profile --from benchmarks.*",
    r"tests\.mutation --list",
)


def commands_to_run() -> list[str]:
    """Each once, with what follows it, as documents print it."""
    found = {
        shlex.join([name, *words])
        for path in DOCUMENTS
        for kind, name, words in commands(path.read_text(encoding="utf-8"))
        if kind == "python -m"
    }
    return sorted(line for line in found if any(re.fullmatch(pattern, line) for pattern in RUN))


@pytest.mark.parametrize("line", commands_to_run())
def test_commands_that_need_no_gpu_run(line: str, tmp_path: Path) -> None:
    """As printed. Files are written into an empty folder; what reads files of the checkout runs in it.

    With the host library alone: one for GPUs may have been built with a few kernels only.
    """
    is_of_checkout = "benchmarks" in line or line.startswith(("generator", "tests"))
    places = {"PYTHONPATH": str(ROOT), "SDPA_CUTLASS_LIBRARY": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(line)],
        cwd=ROOT if is_of_checkout else tmp_path,
        env=os.environ | places | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    written = [word for word in shlex.split(line) if re.search(r"\.(json|csv|md|png)$", word)]
    assert is_of_checkout or [name for name in written if not (tmp_path / name).stat().st_size] == []


def test_every_kind_is_found() -> None:
    found = [one for path in DOCUMENTS for one in commands(path.read_text(encoding="utf-8"))]
    assert len(found) > 100
    assert {name for _, name, _ in found} >= {*PARSERS, "pytest", "benchmarks.models", "docs", "test"}
    assert len(commands_to_run()) >= 10


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
