"""What became of calls: how many this library served, which ones were left to torch, and why."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

logger = logging.getLogger("sdpa_cutlass")


@dataclass(slots=True)
class Usage:
    """What became of the calls since `enable`. Calls inside compiled code are not counted."""

    served: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls that torch served, by reason."""
    log_fallbacks: bool = False
    """Whether the first call of each reason is logged as a warning."""
    quantised: int = 0
    """Those of `served` that ran in the `precision` that was asked for."""


watchers: tuple[Usage, ...] = ()
"""Whose counts a call of F.scaled_dot_product_attention is in; torch_sdpa.py sets them."""


def count_served(*, is_quantised: bool = False) -> None:
    """Counts a call that this library served."""
    for usage in watchers:
        usage.served += 1
        usage.quantised += is_quantised


def count_fallback(reason: str, detail: object = None) -> None:
    """Counts and logs a call that torch serves. `reason` is one of few; `detail` is for the log."""
    is_logged = logger.isEnabledFor(logging.DEBUG)
    message = ""
    for usage in watchers:
        usage.fallbacks[reason] += 1
        is_told = usage.log_fallbacks and usage.fallbacks[reason] == 1
        if is_told or is_logged:
            message = reason if detail is None else f"{reason}: {detail}"
        if is_told:
            logger.warning("scaled_dot_product_attention left to torch (told once): %s", message)
    if is_logged:
        logger.debug("scaled_dot_product_attention left to torch: %s", message or reason)
