"""`attention` on arrays as they lie in memory, without torch: nothing is allocated, copied or filled.

So `out` has to be given, softmax_lse too where it is wanted, and inputs have to be what kernels read in
place. The checks, the choice of a kernel and its parameters are those of every call (planning.py, select.py,
launch.py); no kernel is used in a way that needs a workspace. What is missing is refused by name.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from ..arrays.array_view import ArrayView, contiguous_strides, not_without_torch
from ..arrays.protocols import legacy_as_zero, named_stream, view_of
from ..arrays.tensors import is_tensor
from ..choice.select import choose
from ..dropout import PhiloxState, checked_philox
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..library.registry import Family, Precision
from . import outputs
from .arguments import Inputs, Options, Result
from .binding import Bound, bind
from .launch import library_for, make_params
from .operands import Operands, is_loadable, misalignment
from .rng import NO_PHILOX


def run(options: Options, inputs: Inputs, softmax_lse: Any = None, stream: Any = None) -> Result:
    """Queues the kernel on `stream`, or `out`'s own, and returns; on host arrays it runs the kernel.

    Raises what `attention` raises, before anything is launched.
    """
    if isinstance(options.family, Precision):
        raise UnsupportedError(
            f"precision={options.family.value!r} needs torch installed, which allocates the workspace for "
            "quantised keys and values, and takes neither stream nor softmax_lse"
        )
    if options.family is not Family.FMHA_FWD:
        raise UnsupportedError("unfused_attention needs torch installed, which allocates its workspace")
    _check_unwatched(inputs)
    handle = stream_handle(stream) if stream is not None else _stream_of(inputs.out)
    given = {
        name: view_of(name, value, handle)
        for name, value in zip(Inputs._fields, inputs, strict=True)
        if name not in ("out", "philox") and (value is not None or name in ("query", "key", "value"))
    }
    if inputs.out is None:
        raise ArgumentError(
            f"out is missing: {not_without_torch('allocated')}, so attention(..., out=array) needs an array "
            "for its result"
        )
    if options.return_lse and softmax_lse is None:
        raise ArgumentError(
            f"softmax_lse is missing: {not_without_torch('allocated')}, so return_lse=True needs "
            "softmax_lse=array, float32"
        )
    written = {"out": view_of("out", inputs.out, handle, writable=True)}
    if softmax_lse is not None:
        written["softmax_lse"] = view_of("softmax_lse", softmax_lse, handle, writable=True)
    bound = bind(options, Inputs(**given))
    outputs.check_out(written["out"], bound.operands)
    if softmax_lse is not None:
        _check_lse(written["softmax_lse"], bound.operands)
        outputs.check_no_overlap(written["softmax_lse"], given | {"out": written["out"]}, "softmax_lse")
    outputs.check_no_overlap(written["out"], given)
    if stream is not None and given["query"].device.type == "cpu":
        raise ArgumentError(f"stream={stream!r}; query is on cpu, where there are no streams")
    philox = NO_PHILOX if inputs.philox is None else _philox_of(inputs.philox)
    if not _is_without_rows(bound):
        _check_needs_no_torch(bound, has_philox=inputs.philox is not None)
        _launch(bound._replace(given=bound.given._replace(philox=philox)), options, written, handle)
        _tell_written(inputs.out, softmax_lse)
    return Result(inputs.out, softmax_lse, philox)


def _check_unwatched(inputs: Inputs) -> None:
    """Raises for what only torch's dispatcher could do right, where torch is there."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    from ..library.torch_state import is_watching

    if torch.compiler.is_compiling() or is_watching():
        raise UnsupportedError(
            "torch does not see calls with stream or softmax_lse, and here it is tracing or computes "
            "forward-mode gradients; leave both out"
        )
    for name, value in inputs._asdict().items():
        if is_tensor(value) and value.is_neg():
            raise UnsupportedError(f"{name} has the negative bit; {not_without_torch('copied')}")


def _tell_written(*arrays: Any) -> None:
    """Moves the version counters of tensors."""
    written = tuple(array for array in arrays if is_tensor(array))
    if written:
        from ..library.torch_state import increment_version

        increment_version(written)


def stream_handle(stream: Any) -> int:
    """The handle of a CUDA stream: an integer, or an object with `__cuda_stream__`, `cuda_stream` or `ptr`.

    0 and 1 are the legacy default stream, 2 the per-thread one. Raises ArgumentTypeError or ArgumentError.
    """
    handle = getattr(stream, "__cuda_stream__", None)
    if handle is not None:  # (version, handle), or a method that gives them
        handle = (handle() if callable(handle) else handle)[1]
    elif isinstance(stream, int) and not isinstance(stream, bool):
        handle = stream
    else:
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", None))
    if handle is None:
        raise ArgumentTypeError(
            f"stream is a {type(stream).__name__}; allowed is a handle as an integer, or an object with "
            "__cuda_stream__, cuda_stream or ptr"
        )
    if not 0 <= int(handle) < 2**64:
        raise ArgumentError(f"stream={stream!r}; allowed is the handle of a CUDA stream")
    return legacy_as_zero(int(handle))


def _stream_of(out: Any) -> int:
    """Where `out`'s own library queues work on it, as far as it tells; else the legacy default stream."""
    if is_tensor(out):
        if out.device.type != "cuda":
            return 0
        return int(sys.modules["torch"].cuda.current_stream(out.device).cuda_stream)
    return named_stream("out", out) or 0


def _philox_of(philox: object) -> PhiloxState:
    """`philox`, two integers. A tensor of them is refused by what these calls take, not by what others do."""
    if not isinstance(philox, (tuple, list)):
        raise ArgumentTypeError(
            f"philox is a {type(philox).__name__}; allowed without torch, and with stream or softmax_lse "
            "given, are a PhiloxState and a pair of integers"
        )
    return checked_philox(philox)


def _check_lse(lse: ArrayView, operands: Operands) -> None:
    query = operands.query
    shape = (*operands.batch_shape, *query.shape[1:3])[1 - operands.rank :]
    if lse.shape != shape:
        raise ArgumentError(f"softmax_lse has shape {lse.shape}; the result has {shape}")
    if lse.dtype != "float32":
        raise ArgumentTypeError(f"softmax_lse has dtype {lse.dtype}; allowed is float32")
    if lse.device != query.device:
        raise ArgumentTypeError(f"softmax_lse is on {lse.device}; query is on {query.device}")
    wanted = contiguous_strides(shape)
    if any(size > 1 and at != dense for size, at, dense in zip(shape, lse.strides, wanted, strict=True)):
        raise ArgumentError(f"softmax_lse has strides {lse.strides}; it must be contiguous")


def _is_without_rows(bound: Bound) -> bool:
    """True when there is nothing to write but an empty softmax_lse."""
    return 0 in bound.operands.query.shape[:3]


def _check_needs_no_torch(bound: Bound, *, has_philox: bool) -> None:
    """Raises UnsupportedError for what torch would copy, fill or draw."""
    operands = bound.operands
    if bound.problem.seqlen_k == 0:
        raise UnsupportedError(f"key has seqlen 0, so out is all zeros; {not_without_torch('filled')}")
    for name, tensor in (("query", operands.query), ("key", operands.key), ("value", operands.value)):
        if not is_loadable(tensor):
            reason = misalignment(tensor)
            if tensor.shape[3] % 8 or reason is None:
                reason = f"has head_dim {tensor.shape[3]}; kernels take multiples of 8"
            raise UnsupportedError(f"{name} {reason}; {not_without_torch('copied')}")
    if bound.drops_everything:
        raise UnsupportedError(f"p_dropout is 1, so out is all zeros; {not_without_torch('filled')}")
    if bound.given.p_dropout and not has_philox:
        raise UnsupportedError(
            f"philox is missing: {not_without_torch('drawn')}, so p_dropout needs philox=(seed, offset)"
        )


def _launch(bound: Bound, options: Options, written: dict[str, ArrayView], stream: int) -> None:
    operands, problem, scale, given, _ = bound
    library, device = library_for(operands.query)
    params = make_params(
        problem, scale, operands.query, operands.key, operands.value,
        operands.canonical_out(written["out"]), written.get("softmax_lse"), given,
    )  # fmt: skip
    choice = choose(
        library, problem, options.family, device, params, name=options.kernel, has_workspace=False
    )
    params.num_splits = choice.num_splits
    kernel = choice.kernel
    status = library.launch_function(kernel.index, ctypes.byref(params), device.index, stream or None)
    library.check(status, f"{kernel.name} on {problem}")
