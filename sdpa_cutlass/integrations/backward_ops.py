"""torch.ops.sdpa_cutlass.attention_backward and attention_varlen_backward: gradients as torch operators.

    attention_backward(dout, query, key, value, out, softmax_lse, dlse=None, attn_mask=None, seqlens_q=None,
                       seqlens_k=None, philox=None, sinks=None, *, needs, causal=None, scale=None,
                       enable_gqa=True, kernel_name=None, p_dropout=0.0, layout="bhsd", window=None)
                       -> (dq, dk, dv, dbias)
    attention_varlen_backward(dout, query, key, value, out, softmax_lse, cu_seqlens_q, cu_seqlens_k,
                              max_seqlen_q, max_seqlen_k, dlse=None, philox=None, sinks=None, *, needs,
                              causal=None, scale=None, enable_gqa=True, kernel_name=None, p_dropout=0.0,
                              window=None)
                              -> (dq, dk, dv)

They follow attention_forward and attention_varlen_forward: `out` and `softmax_lse` are what those gave,
`dout` and `dlse` the gradients of it, and with dropout `philox` is what the forward took. `kernel_name` is
that of a backward kernel. `needs`: which of the results to make; the others have no elements. Gradients have
shapes and dtypes of their inputs, and their strides where those are dense; dbias, that of an attn_mask that
is added, is contiguous. What requires grad here is refused: there is no second derivative.
`torch_autograd.py` calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..call import backward, binding, checks
from ..call.arguments import Form, Inputs, Options, as_schema
from ..errors import ArgumentError
from .operators import as_window, define


class _Operator:
    """One operator's kernels. Arguments are as torch's dispatcher gives them: without trailing defaults."""

    def __init__(self, form: Form) -> None:
        self.form = form
        inputs = as_schema(Inputs, form, "out").split(", ")
        needed = [one for one in inputs if "?" not in one]
        arguments = ["Tensor dout", *needed[:3], "Tensor out", "Tensor softmax_lse", *needed[3:]]
        arguments += ["Tensor? dlse=None", *inputs[len(needed) :]]
        options = as_schema(Options, form, "family", "return_lse").replace(" kernel=", " kernel_name=")
        self.names = [one.partition("=")[0].split()[1] for one in arguments]
        self.count = 4 if "attn_mask" in self.names else 3
        results = ", ".join(["Tensor"] * self.count)
        schema = f"({', '.join(arguments)}, *, bool[{self.count}] needs, {options}) -> ({results})"
        self.op = define(f"{form.value}_backward", schema, self.run, self.fake)

    def run(self, *args: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        """The operator's kernel."""
        return self._gradients(args, **named, is_fake=False)

    def fake(self, *args: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        """Shapes, strides and dtypes of `run`, and every error that does not need data or a library."""
        return self._gradients(args, **named, is_fake=True)

    def _gradients(
        self,
        args: tuple[Any, ...],
        *,
        needs: Sequence[bool],
        is_fake: bool,
        kernel_name: str | None = None,
        window: list[int] | None = None,
        **named: Any,
    ) -> tuple[torch.Tensor, ...]:
        given = dict(zip(self.names, args, strict=False))
        results = backward.Results(
            given.pop("out"), given.pop("softmax_lse"), given.pop("dout"), given.pop("dlse", None)
        )
        inputs = Inputs(**given)
        if self.form is Form.PACKED:
            named["layout"] = "bshd"
        bound = binding.bind(Options(window=as_window(window), **named), inputs, allow_meta=is_fake)
        if len(needs) != self.count:
            raise ArgumentError(f"needs has {len(needs)} values; there must be {self.count}")
        likes = (inputs.query, inputs.key, inputs.value, inputs.attn_mask)
        asked = (needs[0], needs[1], needs[2], self.count == 4 and needs[3])
        if is_fake:
            grads = backward.empty_gradients(bound, likes, asked)
        else:
            grads = backward.gradients(bound, likes, results, inputs.philox, asked, kernel_name)
        made = (inputs.query.new_empty(0) if grad is None else grad for grad in grads[: self.count])
        return tuple(made)


_OPERATORS = {form: _Operator(form) for form in Form}


def gradients(
    options: Options, inputs: Inputs, results: backward.Results, needs: backward.Needs
) -> tuple[Any, ...]:
    """dq, dk, dv and dbias by the operator; None for those that `needs` does not ask for."""
    causal = checks.causal_alignment(options.causal)
    operator = _OPERATORS[inputs.form]
    named: dict[str, Any] = {
        "needs": list(needs[: operator.count]),
        "causal": None if causal is None else causal.value,
        "scale": options.scale,
        "enable_gqa": options.enable_gqa,
        "p_dropout": options.p_dropout,
        "window": None if options.window is None else list(options.window),
    }
    if inputs.form is Form.PADDED:
        named["layout"] = checks.tensor_layout(options.layout).value
    given = inputs._asdict() | results._asdict()
    made = operator.op(*(given[name] for name in operator.names), **named)
    grads = (*made, None)[:4]
    return tuple(grad if needed else None for grad, needed in zip(grads, needs, strict=True))
