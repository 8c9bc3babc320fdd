"""Known signatures and their plans: those that were used lately, and at most MAX_PLANS of them.

A key cache that grows brings a new signature with every token, and most are never met again. They must not
push out the plans that every step uses. Noting each use would slow down every call, so there are two
generations: when the younger one is full, it becomes the older one, and what was the older one is dropped. A
plan of the older one that is used is young again. So a plan stays as long as it is used once between
MAX_PLANS / 2 new signatures.
"""

from __future__ import annotations

from typing import Any

from .planning import Prepared

MAX_PLANS = 4096

Signature = tuple[Any, ...]


class Plans(dict[Signature, Prepared]):
    """Signature → plan, the younger generation. Asking for one that is not known raises KeyError.

    Threads may share it: at worst, one plans a signature again that another one had just kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self._older: dict[Signature, Prepared] = {}

    def __missing__(self, signature: Signature) -> Prepared:
        prepared = self._older[signature]
        self.keep(signature, prepared)
        return prepared

    def keep(self, signature: Signature | None, prepared: Prepared | None) -> None:
        """Makes `signature` known. One of them is None where there is nothing to keep."""
        if signature is None or prepared is None:
            return
        if len(self) >= MAX_PLANS // 2:
            self._older = dict(self)
            self.clear()
        self[signature] = prepared
