"""plan(): one attention problem, checked and bound to its kernel once, for calls that nothing may slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ..arrays.tensors import as_tensor
from ..call import binding, outputs, planning, shard, torch_inputs
from ..call.arguments import Inputs, Options
from ..call.extras import Extras
from ..call.launch import Plan
from ..call.operands import Layout, is_loadable, is_virtual
from ..call.precision import asked_of
from ..errors import ArgumentError, UnsupportedError
from ..library.registry import Family, KernelInfo, Precision
from ..problem import Causal, Problem

if TYPE_CHECKING:
    import torch


class AttentionPlan:
    """What `plan` found for one set of sizes, strides and options. Any thread may use it."""

    __slots__ = ("_compiled", "_given", "_launch_at", "_plan", "_torch_state", "out_shape", "out_stride")

    def __init__(self, bound: Plan, given: Extras, out: torch.Tensor) -> None:
        self._plan = bound
        self._launch_at = bound.launch_at
        launcher = bound.launcher
        self._compiled = None if launcher is None else launcher.run
        from ..library import torch_state

        self._torch_state = torch_state.is_watching, torch_state.increment_version
        self._given = given  # the mask, the lengths and the sinks, whose addresses the plan holds
        self.out_shape = tuple(out.shape)
        """Shape of `out`."""
        self.out_stride = tuple(out.stride())
        """Strides of `out`, in elements."""

    @property
    def kernel(self) -> KernelInfo:
        """The kernel that runs."""
        return self._plan.kernel

    @property
    def problem(self) -> Problem:
        """Sizes, dtype and options."""
        return self._plan.problem

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "an AttentionPlan cannot be copied or pickled: it holds addresses of this process; make another "
            "one with plan()"
        )

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor | None = None,
    ) -> None:
        """Queues the kernel on torch's current stream of the plan's device and returns; checks nothing.

        The tensors must have the sizes, strides, dtype and device of those that the plan was made for, and
        addresses that are multiples of 16; `out` has `out_shape` and `out_stride` and overlaps no input;
        softmax_lse, float32 [B, Hq, Sq] contiguous, is given exactly when the plan was made with return_lse.
        Anything else reads or writes where it should not. Whether inputs require grad, or have the negative
        bit, was asked by `plan` and is not asked again. Raises LaunchError or HostCheckError, and
        UnsupportedError where torch would have to see the call: while it traces, or computes forward-mode
        gradients, and for tensors without memory.
        """
        compiled = self._compiled
        if compiled is None or not compiled(query, key, value, out, softmax_lse):
            self._run_in_python(query, key, value, out, softmax_lse)

    def _run_in_python(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor | None,
    ) -> None:
        is_watching, increment_version = self._torch_state
        try:
            q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
            has_memory = bool(q and k and v and out.data_ptr())
        except RuntimeError:
            has_memory = False
        if not has_memory or is_watching():
            _check_unwatched(query=query, key=key, value=value, out=out, softmax_lse=softmax_lse)
        self._launch_at(q, k, v, out, softmax_lse)
        increment_version((out,) if softmax_lse is None else (out, softmax_lse))

    def __repr__(self) -> str:
        return f"AttentionPlan({self.kernel.name}: {self.problem})"


def plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    causal: Causal | str | None = None,
    scale: float | None = None,
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    layout: Layout | str = "bhsd",
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    enable_gqa: bool = True,
    kernel: str | None = None,
    family: Family = Family.FMHA_FWD,
    window: tuple[int, int] | None = None,
    sinks: torch.Tensor | None = None,
    precision: Precision | str | None = None,
    row_offset: int | None = None,
    key_offset: int | None = None,
) -> AttentionPlan:
    """Checks a call of `attention` (for Family.UNFUSED: `unfused_attention`) and prepares it. Runs nothing.

    Arguments are theirs; of query, key, value and `out` only sizes, strides, dtype and device are kept.
    Without `out`, results have the layout that `attention` would give them. Mask, lengths and sinks are
    kept: every run reads what they hold then. No dropout, whose random bits differ from call to call.

    Raises their errors, and ArgumentError for what cannot be run in place: tensors that `attention` would
    copy first, and problems without any score to compute.

    ```python
    q, k, v = torch.randn(3, 1, 8, 512, 64, device="cuda", dtype=torch.float16)
    planned, out = sdpa_cutlass.plan(q, k, v, causal="top_left"), torch.empty_like(q)
    planned.run(q, k, v, out)
    ```
    """
    if row_offset is not None or key_offset is not None:
        causal = shard.word(causal, row_offset, key_offset)
    asked = Options(
        asked_of(precision, family), causal, scale, enable_gqa, kernel, return_lse, 0.0, layout, window
    )
    arrays = Inputs(query, key, value, out, attn_mask, seqlens_q, seqlens_k, sinks=sinks)
    options = torch_inputs.with_flags(asked)
    inputs = Inputs(
        *(
            None if value is None and name not in ("query", "key", "value")
            else as_tensor(name, value, writable=name == "out")
            for name, value in zip(Inputs._fields, arrays, strict=True)
        )
    )  # fmt: skip
    query, key, value, out, attn_mask = inputs[:5]
    _check_unwatched(**inputs._asdict())
    for name, tensor in inputs._asdict().items():
        if tensor is not None and tensor.is_neg():
            raise ArgumentError(
                f"{name} has the negative bit; a plan takes memory that holds its values, as that of "
                f"{name}.resolve_neg()"
            )
    bound = binding.bind(options, inputs)
    operands, problem, _, given, _ = bound
    if problem.is_empty:
        raise ArgumentError(f"{problem} runs no kernel: its result is empty or zero")
    for name, tensor, canonical in (
        ("query", query, operands.query),
        ("key", key, operands.key),
        ("value", value, operands.value),
        ("attn_mask", attn_mask, given.mask),
    ):
        if tensor is None or canonical is None:
            continue
        is_in_place = name == "attn_mask" or is_loadable(canonical)
        if not is_in_place or canonical.data_ptr() != tensor.data_ptr():
            raise ArgumentError(
                f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}, dtype {tensor.dtype}; "
                "a plan takes what kernels read in place: head_dims that are multiples of 8, the last "
                "dimension contiguous, the address and other strides multiples of 16 bytes"
            )
    if out is None:
        result = outputs.empty_out(operands)
    else:
        result = operands.canonical_out(outputs.check_out(out, operands))
    lse = outputs.empty_lse(operands) if return_lse else None
    made = planning.make_plan(bound, options, operands.query, operands.key, operands.value, result, lse)
    return AttentionPlan(made, given, operands.restore(result) if out is None else out)


def _check_unwatched(**tensors: Any) -> None:
    """Raises UnsupportedError where a plan would do what torch has to see, or to do."""
    from ..library import torch_state

    if torch_state.is_watching():
        raise UnsupportedError(
            "torch does not see plans, and here it is tracing or computes forward-mode gradients; call "
            "attention instead"
        )
    for name, tensor in tensors.items():
        if tensor is not None and is_virtual(tensor):
            raise UnsupportedError(
                f"{name} is a {type(tensor).__name__} without memory, as inside torch.func or of a "
                "FakeTensorMode; call attention instead"
            )
