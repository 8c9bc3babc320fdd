"""Blocks of documents that show what a command prints, so that nobody types it.

    <!-- output: profile --static --kernel fmha_fwd_sm89_d64_m64n64_s1_w4_f16 -->
    ...
    <!-- end output -->

`python -m tests.docs.outputs docs/profiling.md` runs the commands of `python -m sdpa_cutlass` in the markers
and puts what they print between them; test_outputs.py fails when that changes anything.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

from sdpa_cutlass.cli import main
from sdpa_cutlass.cli.results import write_atomically

_BLOCK = re.compile(r"<!-- output: (?P<command>.+?) -->\n.*?<!-- end output -->", re.DOTALL)


def refresh(text: str) -> str:
    """The text with every block made again. Raises RuntimeError when a command fails."""
    return _BLOCK.sub(lambda match: block(match["command"]), text)


def commands(text: str) -> list[str]:
    """The commands whose output a text shows."""
    return [match["command"] for match in _BLOCK.finditer(text)]


def block(command: str) -> str:
    """A block as a document has it, made now. Raises RuntimeError when the command fails."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(shlex.split(command))
    if status:
        raise RuntimeError(f"`python -m sdpa_cutlass {command}` ends with {status}")
    lines = [line.rstrip() for line in printed.getvalue().rstrip().splitlines()]
    shown = "\n".join([f"$ python -m sdpa_cutlass {command}", *lines])
    return f"<!-- output: {command} -->\n```\n{shown}\n```\n<!-- end output -->"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        write_atomically(path, refresh(path.read_text(encoding="utf-8")))
