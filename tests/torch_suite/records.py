"""What became of PyTorch's tests in each mode, read from lines of JSON, and where two modes differ."""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

GOOD = frozenset({"passed", "skipped", "xfailed"})


class Mode(str, Enum):
    """Where the library stands while the tests run."""

    PLAIN = "plain"
    """Nowhere: what the others are compared with."""
    ENABLED = "enabled"
    """In F.scaled_dot_product_attention, by enable()."""
    SWAP = "swap"
    """At torch's swap point for flash attention, on CUDA."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one test ended."""

    outcome: str
    """passed, skipped, xfailed; failed, error (outside the test itself), timeout, crashed."""
    message: str = ""
    served: int = 0
    """Calls that the library served in it."""
    seconds: float = 0.0


@dataclass(slots=True)
class Records:
    """One mode's file."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """By test; of a test that ran more than once, the last."""
    collected: int = 0
    unfinished: str | None = None
    """The test that started last and has not ended."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls that torch served, by reason."""

    def summary(self) -> dict[str, Any]:
        """Counts for the report."""
        outcomes = self.outcomes.values()
        return {
            "tests": len(self.outcomes),
            "collected": self.collected,
            "outcomes": dict(Counter(outcome.outcome for outcome in outcomes)),
            "calls_served": sum(outcome.served for outcome in outcomes),
            "tests_with_served_calls": sum(outcome.served > 0 for outcome in outcomes),
            "calls_left_to_torch": dict(self.fallbacks),
            "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
        }


def read(path: Path) -> Records:
    """The lines of `path`; nothing when it is not there."""
    records = Records()
    if not path.exists():
        return records
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "started" in line:
            records.unfinished = line["started"]
        elif "test" in line:
            records.unfinished = None
            records.outcomes[line["test"]] = Outcome(
                line["outcome"], line["message"], line["served"], line["seconds"]
            )
        elif "collected" in line:
            records.collected = line["collected"]
        else:
            records.fallbacks.update(line["fallbacks"])
    return records


def of_mode(folder: Path, mode: Mode) -> Records:
    """All files of `mode` in `folder` together, one for each process; `unfinished` is of no use then."""
    together = Records()
    for path in sorted(folder.glob(f"{mode.value}*.jsonl")):
        records = read(path)
        together.outcomes.update(records.outcomes)
        together.collected = max(together.collected, records.collected)
        together.fallbacks.update(records.fallbacks)
    return together


@dataclass(frozen=True, slots=True)
class Difference:
    """A test that is good without the library and not with it."""

    test: str
    mode: Mode
    plain: Outcome
    found: Outcome
    reason: str | None
    """Why that is as it should be, for a test that is listed; else None."""


def differences(plain: Records, found: Records, mode: Mode, explained: dict[str, str]) -> list[Difference]:
    """Tests that are worse in `mode`. `explained` has reasons by pattern of names."""
    worse = []
    for test, outcome in found.outcomes.items():
        before = plain.outcomes.get(test)
        if before is None or before.outcome not in GOOD or outcome.outcome == before.outcome:
            continue
        if outcome.outcome in GOOD and before.outcome == "skipped":
            continue
        reason = next((why for names, why in explained.items() if fnmatch.fnmatchcase(test, names)), None)
        worse.append(Difference(test, mode, before, outcome, reason))
    return worse
