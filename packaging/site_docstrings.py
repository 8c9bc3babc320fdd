"""The package's docstrings as Markdown, for the site's reference: mkdocs.yml names this file.

In the source a line `name: meaning`, its next lines indented, explains an option. On a page these lines are a
list, and names with two underscores are code, where Markdown would make them bold.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

OPTION = re.compile(r"^(?P<names>[a-z_]+(?:, [a-z_]+)*): ")
DUNDER = re.compile(r"(?<![`\w])__\w+__(?!`)")
INDENT = "    "


class MarkdownDocstrings(griffe.Extension):
    """Rewrites each docstring when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """The object of a name, a class or a function, with its docstring."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring → Markdown with the options of each paragraph as a list."""
    paragraphs = [_options(paragraph) for paragraph in text.split("\n\n")]
    return DUNDER.sub(r"`\g<0>`", "\n\n".join(paragraphs))


def _options(paragraph: str) -> str:
    """The paragraph as a list where each line explains an option or goes on with one, else as it was."""
    lines = paragraph.splitlines()
    if not lines or not all(OPTION.match(line) or line.startswith(INDENT) for line in lines):
        return paragraph
    return "\n".join(OPTION.sub(lambda found: f"- **{found['names']}**: ", line) for line in lines)
