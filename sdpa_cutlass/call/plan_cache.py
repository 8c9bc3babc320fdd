"""Known signatures and their plans: those that were used lately, and at most MAX_PLANS of them.

A key cache that grows brings a new signature with every token, and most are never met again. They must not
push out the plans that every step uses. Noting each use would slow down every call, so there are two
generations: when the younger one is full, it becomes the older one, and what was the older one is dropped. A
plan of the older one that is used is young again. So a plan stays as long as it is used once between
MAX_PLANS / 2 new signatures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arguments import Result

if TYPE_CHECKING:
    import torch

    from .extras import Extras
    from .planning import Prepared

MAX_PLANS = 4096

Signature = tuple[Any, ...]


class Plans(dict[Signature, "Prepared | None"]):
    """Signature → plan, the younger generation; one that is not known has None.

    Threads may share it: at worst, one plans a signature again that another one had just kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self._older: dict[Signature, Prepared | None] = {}

    def __missing__(self, signature: Signature) -> Prepared | None:
        prepared = self._older.get(signature)
        if prepared is not None:
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


def signature_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a plan depends on. Raises what a value that is no tensor raises."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def require_data(*values: Any) -> None:
    """Raises RuntimeError for a tensor without memory: FakeTensor, a functional tensor, inside torch.func."""
    for value in values:
        if value is not None and not isinstance(value, (tuple, list)) and not value.data_ptr():
            raise RuntimeError("a tensor has no memory")


def launch(
    prepared: Prepared,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    given: Extras,
) -> Result:
    """Runs a known signature on tensors as the caller gave them; `given` has its random bits."""
    plan, empty_like, make_lse, out_stride, out_shape, *_ = prepared
    if out is None:
        out = empty_like(query) if out_stride is None else query.new_empty_strided(out_shape, out_stride)
    lse = None if make_lse is None else make_lse()
    plan.launch(query, key, value, out, lse, given)
    return Result(out, lse, given.philox)
