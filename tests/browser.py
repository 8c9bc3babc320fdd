"""Pages in a headless browser: each is opened from its file, and a script in it answers."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--dump-dom",
)  # fmt: skip
ANSWER = """
const answer = (found) => {
  const text = document.createElement("pre");
  text.id = "answers";
  text.textContent = JSON.stringify(found);
  document.body.append(text);
};
"""


def ask(page: Path, script: str, profile: Path, *more: str, width: int = 1280) -> Any:
    """What `script` hands to `answer` in `page`, to whose end it is added.

    profile: an empty folder for the browser. more: flags of Chromium; "--virtual-time-budget=N" lets timers
    run. Headless Chromium has no window of less than 500 pixels. Skips the test where there is no browser.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH")
    text = page.read_text(encoding="utf-8")
    assert "</body>" in text
    addition = f'<script>\n"use strict";{ANSWER}{script}</script>'
    page.write_text(text.replace("</body>", f"{addition}</body>"), encoding="utf-8")
    done = subprocess.run(
        [browser, *FLAGS, *more, f"--user-data-dir={profile}", f"--window-size={width},900", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
    )
    found = re.search(r'<pre id="answers">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))
