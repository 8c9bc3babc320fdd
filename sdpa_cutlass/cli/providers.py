"""Who computes attention: this library's two families and their peers, as callables of one form.

    bind(case)(qkv, out) -> output [B, Hq, Sq, D]

`out` is a tensor to write to; peers that cannot write to a given tensor ignore it and return a new one. What
a provider needs around its calls (torch's choice of backend) is a context, entered once around many calls so
that it costs no measured time. Whether a provider can run a problem is found out by trying:
describe_failure() turns what was raised into one line for a result's status.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import sdpa_cutlass
from sdpa_cutlass.cli.accuracy import naive_attention
from sdpa_cutlass.cli.inputs import QKV
from sdpa_cutlass.cli.results import PROVIDERS
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.problem import Causal
from sdpa_cutlass.registry import Family

if TYPE_CHECKING:
    import torch

Attention = Callable[[QKV, "torch.Tensor"], "torch.Tensor"]

STATUS_LIMIT = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provider:
    """One implementation of attention. `family` is set for the two that this library provides."""

    name: str
    bind: Callable[[Case], Attention]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    family: Family | None = None

    @property
    def every_element(self) -> bool:
        """Whether accuracy.py's bound on every element applies."""
        return self.family is Family.FMHA_FWD


def alignment(case: Case) -> Causal | None:
    """The causal option that `attention` and `unfused_attention` take for this problem."""
    return Causal.TOP_LEFT if case.causal else None


def _function_of(family: Family) -> Callable[..., Any]:
    # Looked up at every use, so that a test can put another function in its place.
    return sdpa_cutlass.attention if family is Family.FMHA_FWD else sdpa_cutlass.unfused_attention


def _bind_ours(family: Family) -> Callable[[Case], Attention]:
    def bind(case: Case) -> Attention:
        function, causal = _function_of(family), alignment(case)

        def run(qkv: QKV, out: torch.Tensor) -> torch.Tensor:
            function(qkv.q, qkv.k, qkv.v, causal=causal, out=out)
            return out

        return run

    return bind


def with_lse(provider: Provider, case: Case, qkv: QKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp [B, Hq, Sq] of one of this library's families."""
    assert provider.family is not None
    out, lse = _function_of(provider.family)(*qkv, causal=alignment(case), return_lse=True)
    return out, lse


def kernel_name(provider: Provider, case: Case, qkv: QKV) -> str | None:
    """The name of the kernel that this library chooses for a problem; None for the other providers."""
    if provider.family is None:
        return None
    explanation = sdpa_cutlass.explain(*qkv, causal=alignment(case), family=provider.family)
    return explanation.choice.kernel.name


def _bind_torch(case: Case) -> Attention:
    from torch.nn.functional import scaled_dot_product_attention

    options: dict[str, Any] = {"is_causal": case.causal}
    if case.num_heads_kv != case.num_heads_q:
        options["enable_gqa"] = True

    def run(qkv: QKV, out: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = scaled_dot_product_attention(qkv.q, qkv.k, qkv.v, **options)
        return result

    return run


def _torch_backend(name: str) -> Callable[[], AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def context() -> Iterator[None]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel([getattr(SDPBackend, name)]):
            yield

    return context


def _bind_naive(case: Case) -> Attention:
    return lambda qkv, out: naive_attention(qkv, causal=case.causal)


ALL = {
    provider.name: provider
    for provider in (
        Provider(name="fused", bind=_bind_ours(Family.FMHA_FWD), family=Family.FMHA_FWD),
        Provider(name="piped", bind=_bind_ours(Family.UNFUSED), family=Family.UNFUSED),
        Provider(name="torch_flash", bind=_bind_torch, context=_torch_backend("FLASH_ATTENTION")),
        Provider(name="torch_cudnn", bind=_bind_torch, context=_torch_backend("CUDNN_ATTENTION")),
        Provider(name="torch_efficient", bind=_bind_torch, context=_torch_backend("EFFICIENT_ATTENTION")),
        Provider(name="torch_math", bind=_bind_torch, context=_torch_backend("MATH")),
        Provider(name="naive", bind=_bind_naive),
    )
}
assert tuple(ALL) == PROVIDERS


@contextlib.contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """The texts of warnings raised inside: torch says in warnings why a backend refuses a problem."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts += [str(warning.message) for warning in caught]


def describe_failure(error: BaseException, warned: list[str] | None = None) -> str:
    """One line for a result's status: `out of memory`, `refused: ...`, `not built: ...` or `error: ...`."""
    import torch

    text = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, sdpa_cutlass.LibraryNotFoundError):
        return _shorten("not built", text)
    if "No available kernel" in text or "No viable backend" in text:
        return _shorten("refused", _torch_reason(warned or []) or "torch has no such kernel for this here")
    if isinstance(error, NotImplementedError):
        return _shorten("refused", text)
    return _shorten("error", f"{type(error).__name__}: {text}")


def _torch_reason(warned: list[str]) -> str:
    """The first warning that gives a reason; torch announces each backend with a line that gives none."""
    for text in warned:
        if "not used because" not in text and "Triggered internally" in text:
            return text.split(" (Triggered internally")[0]
    return ""


def _shorten(kind: str, text: str) -> str:
    line = " ".join(f"{kind}: {text}".split())
    return line if len(line) <= STATUS_LIMIT else line[: STATUS_LIMIT - 1] + "…"
