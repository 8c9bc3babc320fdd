"""torch.ops.sdpa_cutlass: the kernels as torch operators, for torch.compile, torch.export and FakeTensor.

    attention_forward(query, key, value, attn_mask=None, seqlens_q=None, seqlens_k=None, philox=None,
                      sinks=None, *, family="fmha_fwd", causal=None, scale=None, enable_gqa=True,
                      kernel_name=None, return_lse=False, p_dropout=0.0, layout="bhsd", window=None,
                      precision=None)
                      -> (out, softmax_lse)
    attention_forward_out(query, key, value, out, attn_mask=None, ...the same...) -> softmax_lse
    attention_varlen_forward(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                             philox=None, sinks=None, *, ...the same without family and layout...)
                             -> (out, softmax_lse)
    attention_varlen_forward_out(query, key, value, out, cu_seqlens_q, ...the same...) -> softmax_lse

Their schemas follow from call/arguments.py. Arguments, shapes and errors are those of
`sdpa_cutlass.attention` and `attention_varlen`; `causal` is None, "top_left" or "bottom_right", `family`
"fmha_fwd" or "unfused", `kernel_name` what is `kernel` there; softmax_lse has no elements unless
`return_lse`. The operators draw no random numbers: with dropout they need `philox` [2]. A traced call of
`attention` draws it with torch.randint in front of the operator. attention_forward and
attention_varlen_forward are differentiable in query, key, value, sinks and an attn_mask that is added
(torch_autograd.py); other inputs that require grad, and all in forward mode, are refused. Importing this
module registers the operators; the package does so itself when a public function is traced. Eager calls of
the public functions do not come through here: the dispatcher costs more than the rest of the call.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call import binding, calls, checks, outputs, rng
from ..call.arguments import Form, Inputs, Options, Result, arguments_of, as_schema
from ..call.precision import asked_of
from ..library.registry import Family, Precision
from ..problem import Causal
from . import backward_ops  # noqa: F401  it registers its own
from .operators import as_traced, as_window, check_has_philox, no_lse, register, traced_philox


class _Operator:
    """One operator's kernels. Arguments are as torch's dispatcher gives them: without trailing defaults."""

    def __init__(self, form: Form, *, has_out: bool) -> None:
        self.form = form
        self.has_out = has_out
        self.names = tuple(name for name in arguments_of(Inputs, form) if has_out or name != "out")
        without = () if has_out else ("out",)
        # kernel_name, not kernel: Inductor passes options on by name, beside an argument `kernel` of its own.
        options = as_schema(Options, form).replace(" kernel=", " kernel_name=")
        results = "Tensor" if has_out else "(Tensor, Tensor)"
        self.op = register(
            f"{form.value}_forward_out" if has_out else f"{form.value}_forward",
            f"({as_schema(Inputs, form, *without)}, *, {options}, str? precision=None) -> {results}",
            self.run,
            self.fake,
            self.names.index("attn_mask") if "attn_mask" in self.names else None,
            None if has_out else self.record,
        )

    def read(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Options, Inputs]:
        """The call's records. Raises ArgumentError for dropout without philox."""
        inputs = Inputs(**dict(zip(self.names, args, strict=False)))
        family = Family(named.pop("family", Family.FMHA_FWD.value))
        if self.form is Form.PACKED:
            named["layout"] = "bshd"
        options = Options(
            asked_of(named.pop("precision", None), family),
            kernel=named.pop("kernel_name", None),
            window=as_window(named.pop("window", None)),
            **named,
        )
        check_has_philox(options.p_dropout, inputs.philox)
        return options, inputs

    def run(self, *args: Any, **named: Any) -> Any:
        """The operator's kernel: softmax_lse, and before it out where that was not given."""
        options, inputs = self.read(args, named)
        out, lse, _ = calls.run_call(options, inputs, is_operator=True)
        lse = no_lse(inputs.query) if lse is None else lse
        return lse if self.has_out else (out, lse)

    def fake(self, *args: Any, **named: Any) -> Any:
        """Shapes, strides and dtypes of `run`, and every error that does not need data or a library."""
        options, inputs = self.read(args, named)
        operands = binding.bind(options, inputs, allow_meta=True).operands
        if inputs.philox is not None:
            rng.checked(inputs.philox, inputs.query)
        out = operands.restore(outputs.empty_out(operands))
        lse = no_lse(inputs.query)
        if options.return_lse:
            lse = operands.restore_lse(outputs.empty_lse(operands))
        if not self.has_out:
            return out, lse
        outputs.check_out_type(inputs.out, inputs.query, tuple(out.shape))
        return lse

    def record(self, *args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """A call whose query, key, value, attn_mask or sinks require grad."""
        from . import torch_autograd

        return torch_autograd.recorded(*self.read(args, named))


# By themselves, not in a table: compiled code checks at every call that what it depends on is as it was.
_PADDED = _Operator(Form.PADDED, has_out=False)
_PADDED_OUT = _Operator(Form.PADDED, has_out=True)
_PACKED = _Operator(Form.PACKED, has_out=False)
_PACKED_OUT = _Operator(Form.PACKED, has_out=True)


def traced(options: Options, inputs: Inputs) -> Result:
    """`calls.run_call` as a call of the operator: what torch.compile traces instead."""
    is_padded = inputs.cu_seqlens_q is None
    if inputs.out is None:
        operator = _PADDED if is_padded else _PACKED
    else:
        operator = _PADDED_OUT if is_padded else _PACKED_OUT
    state = traced_philox(options.p_dropout, inputs.philox, as_traced(inputs.query))
    named = {
        "causal": options.causal.value if isinstance(options.causal, Causal) else options.causal,
        "scale": None if options.scale is None else float(options.scale),
        "enable_gqa": options.enable_gqa,
        "kernel_name": options.kernel,
        "return_lse": options.return_lse,
        "p_dropout": float(options.p_dropout),
        "window": None if options.window is None else list(options.window),
        "precision": options.family.value if isinstance(options.family, Precision) else None,
    }
    if is_padded:
        named["family"] = (options.family if isinstance(options.family, Family) else Family.FMHA_FWD).value
        named["layout"] = checks.tensor_layout(options.layout).value
    tensors = (state if name == "philox" else as_traced(getattr(inputs, name)) for name in operator.names)
    result = operator.op(*tensors, **named)
    out, lse = (inputs.out, result) if operator.has_out else result
    return Result(out, lse if options.return_lse else None, rng.NO_PHILOX if state is None else state)
