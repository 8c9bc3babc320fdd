"""Who computes attention: this library's families and their peers, as callables of one form.

    bind(case, operands)() -> output [B, Hq, Sq, D], of packed operands [total, Hq, D]

Binding allocates an output to write to; peers that cannot write to a given tensor return a new one each time.
What a provider needs around its calls (torch's choice of backend) is a context, entered once around many
calls so that it costs no measured time. Whether a provider can run a problem is found out by trying:
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
from sdpa_cutlass.cli.conditions import PHILOX, Conditions
from sdpa_cutlass.cli.inputs import QKV
from sdpa_cutlass.cli.results import PROVIDERS
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.library.registry import Family
from sdpa_cutlass.problem import Causal

if TYPE_CHECKING:
    import torch

Call = Callable[[], "torch.Tensor"]

STATUS_LIMIT = 200
REFUSALS = ("invalid dtype for bias", "Expected attn_mask dtype")  # torch raises these from within a backend


@dataclasses.dataclass(frozen=True)
class Operands:
    """One input set: q, k and v, padded and where the problem is packed also so; and what all sets share."""

    qkv: QKV
    conditions: Conditions
    packed: QKV | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provider:
    """One implementation of attention. `family` is set for those that this library provides.

    `is_plain`: it computes the plain problem, without the mask, lengths and dropout. `is_quantised`: it
    multiplies in 8 bits, which the hardware does twice as fast.
    """

    name: str
    bind: Callable[[Case, Operands], Call]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    family: Family | None = None
    is_plain: bool = False
    is_quantised: bool = False

    @property
    def every_element(self) -> bool:
        """Whether accuracy.py's bound on every element applies."""
        return self.family is Family.FMHA_FWD


@dataclasses.dataclass(frozen=True)
class OwnCall:
    """A call of this library: how `attention`, `attention_varlen` or `unfused_attention` is called."""

    name: str
    tensors: tuple[torch.Tensor, ...]
    options: dict[str, Any]

    def __call__(self, **more: Any) -> Any:
        # Looked up at every use, so that a test can put another function in its place.
        return getattr(sdpa_cutlass, self.name)(*self.tensors, **self.options, **more)


def own_call(provider: Provider, case: Case, operands: Operands) -> OwnCall:
    """How one of this library's providers computes a problem."""
    conditions = operands.conditions
    options: dict[str, Any] = {"causal": case.problem().causal}
    if provider.is_plain:
        return OwnCall("attention", operands.qkv, options)
    if provider.family is Family.UNFUSED:
        if not case.is_plain:
            raise sdpa_cutlass.UnsupportedError("the piped baseline has neither masks nor dropout")
        return OwnCall("unfused_attention", operands.qkv, options)
    if case.p_dropout:
        options |= {"p_dropout": case.p_dropout, "philox": PHILOX}
    if operands.packed is not None:
        cu_seqlens, seqlens = conditions.cu_seqlens, (case.seqlen_q, case.seqlen_k)
        return OwnCall("attention_varlen", (*operands.packed, cu_seqlens, cu_seqlens, *seqlens), options)
    if conditions.own_mask is not None:
        options["attn_mask"] = conditions.own_mask
    if conditions.seqlens_k is not None:
        options["seqlens_k"] = conditions.seqlens_k
    return OwnCall("attention", operands.qkv, options)


def _own(name: str, family: Family, *, is_plain: bool = False) -> Provider:
    def bind(case: Case, operands: Operands) -> Call:
        import torch

        call = own_call(provider, case, operands)
        out = torch.empty_like(call.tensors[0])

        def run() -> torch.Tensor:
            call(out=out)
            return out

        return run

    provider = Provider(name=name, bind=bind, family=family, is_plain=is_plain)
    return provider


def with_lse(provider: Provider, case: Case, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp [B, Hq, Sq] (packed: [Hq, total]) of one of this library's families."""
    out, lse = own_call(provider, case, operands)(return_lse=True)
    return out, lse


def kernel_name(provider: Provider, case: Case, operands: Operands) -> str | None:
    """The name of the kernel that this library chooses for a problem; None for the other providers."""
    if provider.family is None:
        return None
    call = own_call(provider, case, operands)
    tensors, options = call.tensors, dict(call.options)
    options.pop("philox", None)
    if operands.conditions.cu_seqlens is not None and not provider.is_plain:  # chosen as if it were padded
        tensors = operands.qkv
        options["seqlens_q"] = options["seqlens_k"] = operands.conditions.cu_seqlens.diff()
    return sdpa_cutlass.explain(*tensors, family=provider.family, **options).choice.kernel.name


def is_aligned_right(case: Case) -> bool:
    """True when the causal mask is one that torch's `is_causal` does not mean."""
    unequal = case.seqlen_q != case.seqlen_k
    return case.causal and unequal and case.alignment is Causal.BOTTOM_RIGHT


def _bind_torch(case: Case, operands: Operands, *, has_lower_right: bool = False) -> Call:
    """A bottom_right mask goes to torch as its own causal bias, or as a boolean mask made beforehand."""
    from torch.nn.functional import scaled_dot_product_attention

    if operands.packed is not None:
        raise NotImplementedError("this backend takes packed sequences as nested tensors only")
    options: dict[str, Any] = {
        "attn_mask": operands.conditions.mask,
        "dropout_p": case.p_dropout,
        "is_causal": case.causal and not is_aligned_right(case),
    }
    if is_aligned_right(case):
        options["attn_mask"] = _lower_right(case, operands, as_bias=has_lower_right)
    if case.num_heads_kv != case.num_heads_q:
        options["enable_gqa"] = True

    def run() -> torch.Tensor:
        result: torch.Tensor = scaled_dot_product_attention(*operands.qkv, **options)
        return result

    return run


def _lower_right(case: Case, operands: Operands, *, as_bias: bool) -> Any:
    import torch
    from torch.nn.attention.bias import causal_lower_right

    if operands.conditions.mask is not None:
        raise NotImplementedError("torch has no bottom_right causal mask next to another mask")
    if as_bias:
        return causal_lower_right(case.seqlen_q, case.seqlen_k)
    q = operands.qkv.q
    every = torch.ones(1, 1, case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=q.device)
    return every.tril(case.problem().causal_offset)


def _bind_torch_flash(case: Case, operands: Operands) -> Call:
    """As every backend; packed through the operator that torch's own varlen_attn calls."""
    if operands.packed is None:
        return _bind_torch(case, operands, has_lower_right=True)
    import torch

    cu_seqlens, lengths = operands.conditions.cu_seqlens, (case.seqlen_q, case.seqlen_k)
    arguments = (*operands.packed, cu_seqlens, cu_seqlens, *lengths, case.p_dropout, case.causal, False)
    return lambda: torch.ops.aten._flash_attention_forward(*arguments)[0]


def _bind_torch_efficient(case: Case, operands: Operands) -> Call:
    """As every backend; packed through the operator that torch's nested tensors call."""
    if operands.packed is None:
        return _bind_torch(case, operands, has_lower_right=True)
    import torch

    q, k, v = (tensor.unsqueeze(0) for tensor in operands.packed)
    cu_seqlens, lengths = operands.conditions.cu_seqlens, (case.seqlen_q, case.seqlen_k)
    mask_type = int(case.causal)  # 0: none, 1: causal from the top left
    arguments = (q, k, v, None, cu_seqlens, cu_seqlens, *lengths, case.p_dropout, mask_type)
    return lambda: torch.ops.aten._efficient_attention_forward(*arguments)[0].squeeze(0)


def _torch_backend(name: str) -> Callable[[], AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def context() -> Iterator[None]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel([getattr(SDPBackend, name)]):
            yield

    return context


def _bind_naive(case: Case, operands: Operands) -> Call:
    if operands.packed is not None:
        raise NotImplementedError("the naive chain has no packed sequences")
    options: dict[str, Any] = {"mask": operands.conditions.mask, "p_dropout": case.p_dropout}
    offset = case.problem().causal_offset
    return lambda: naive_attention(operands.qkv, causal=case.causal, offset=offset, **options)


ALL = {
    provider.name: provider
    for provider in (
        _own("fused", Family.FMHA_FWD),
        _own("plain", Family.FMHA_FWD, is_plain=True),
        _own("piped", Family.UNFUSED),
        Provider(name="torch_flash", bind=_bind_torch_flash, context=_torch_backend("FLASH_ATTENTION")),
        Provider(name="torch_cudnn", bind=_bind_torch, context=_torch_backend("CUDNN_ATTENTION")),
        Provider(
            name="torch_efficient",
            bind=_bind_torch_efficient,
            context=_torch_backend("EFFICIENT_ATTENTION"),
        ),
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
    if isinstance(error, NotImplementedError) or any(refusal in text for refusal in REFUSALS):
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
