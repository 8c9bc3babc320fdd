"""Keys and values that were quantised before: what holds them, how it grows, and attention over it.

A plain call with a precision makes bytes of K and V and attends to them, in two launches. Here the first one
is made once, into memory that a QuantizedKV keeps (quantized_memory.py): the C ABI's `total_k` above 0, with
q and out null. Every call makes the second one alone, with that memory as `quantized`.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from ctypes import c_void_p
from typing import TYPE_CHECKING, Any, NoReturn

from ..arrays.tensors import as_tensor
from ..choice.select import choose, ranking
from ..errors import ArgumentError, ArgumentTypeError, NoKernelError, UnsupportedError
from ..library.device import stream_getter
from ..library.locate import Target
from ..library.registry import Family, KernelInfo, Precision, read_kernels
from ..library.structs import Params
from ..problem import Problem
from . import checks, outputs, rng, torch_hooks, torch_inputs
from .arguments import Inputs, Options, Result
from .binding import bind
from .extras import NO_EXTRAS, Extras, dense_copy, needs_dense_copy, refuse_causal_bias
from .launch import library_for, make_params, make_workspace
from .operands import INT32_MAX, Layout, dtype_name, loadable, padded
from .planning import execute
from .quantized_checks import SHAPE, checked_pair, out_of_graphs, refuse_tracing
from .quantized_memory import BLOCK, Memory, whole_blocks

if TYPE_CHECKING:
    import torch


class QuantizedKV:
    """Keys and values as quantised kernels read them, made by `quantize_kv` and taken by `attention`.

    It owns its memory: of int8, bytes and their scales; of int8_qk, bytes of the keys and the values in 16
    bits. Of all else it keeps the 16-bit keys and values of the last block alone, at most 63. Calls on other
    streams than the one that made or grew it have to wait for that one, as for any tensor. It cannot be
    copied or pickled.
    """

    __slots__ = (
        "_element", "_kernel", "_lengths", "_memory", "_place", "_precision", "_seqlen", "_shape", "_tail",
        "_values",
    )  # fmt: skip

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, precision: Precision, lengths: torch.Tensor | None
    ) -> None:
        """`key` and `value` are checked, `lengths` are this object's own."""
        batch, heads, seqlen, head_dim = key.shape
        self._precision = precision
        self._shape = batch, heads, head_dim, value.shape[3]
        self._seqlen = seqlen
        self._lengths = lengths
        self._tail: tuple[torch.Tensor, ...] = ()
        self._place = library_for(key)
        with _ordinary_tensors():
            self._element = key.new_zeros(1)
            self._kernel = self._find_kernel()
            self._memory, self._values = self._new_memory(whole_blocks(seqlen))
            if self._values is not None:
                self._values[:, :, :seqlen, : value.shape[3]] = value
            self._quantize(self._memory, key, value)
            if lengths is None:
                self._keep_tail(key, value)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self._shape[0]

    @property
    def num_heads_kv(self) -> int:
        """Heads of keys and values."""
        return self._shape[1]

    @property
    def seqlen_k(self) -> int:
        """Keys of each sequence, padding included."""
        return self._seqlen

    @property
    def head_dim(self) -> int:
        """Columns of a key, as they were given."""
        return self._shape[2]

    @property
    def head_dim_v(self) -> int:
        """Columns of a value, as they were given."""
        return self._shape[3]

    @property
    def dtype(self) -> torch.dtype:
        """What keys and values had, and queries must have."""
        return self._element.dtype

    @property
    def device(self) -> torch.device:
        """Where the memory lies."""
        return self._element.device

    @property
    def precision(self) -> Precision:
        """What was rounded to 8 bits."""
        return self._precision

    @property
    def nbytes(self) -> int:
        """Bytes of memory on the device, with the room for keys to come."""
        others = (self._element, self._values, self._lengths, *self._tail)
        return self._memory.nbytes + sum(tensor.nbytes for tensor in others if tensor is not None)

    @out_of_graphs
    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Adds keys [batch, num_heads_kv, n, head_dim] and values [..., head_dim_v] at the end.

        Blocks of 64 keys that are full stay as they are, the last one is quantised again with the new keys.
        The mean that is subtracted from every key is fixed once there are 64: it is that of those that were
        there then. Room grows by half at least, so that n keys are copied O(n) times in all. Queued
        on torch's current stream. The method is SageAttention's (Zhang et al., 2024), whose mean is that of
        all keys.

        Raises ArgumentTypeError or ArgumentError for tensors of other sizes, dtypes or devices, and
        UnsupportedError for those that require grad, while torch traces, and where `quantize_kv` was given
        seqlens_k: nothing has changed then. LaunchError when CUDA refuses.
        """
        if self._lengths is not None:
            raise UnsupportedError(
                "append: this QuantizedKV was made with seqlens_k; allowed is one without, whose sequences "
                "all end at seqlen_k"
            )
        key, value = checked_pair(key, value)
        wanted = {"key": (key, self.head_dim), "value": (value, self.head_dim_v)}
        for name, (tensor, columns) in wanted.items():
            if (*tensor.shape[:2], tensor.shape[3]) != (*self._shape[:2], columns):
                raise ArgumentError(
                    f"{name} has shape {tuple(tensor.shape)}; allowed is {SHAPE} with "
                    f"({self.batch}, {self.num_heads_kv}, any, {columns})"
                )
            checks.check_form(name, tensor, self._element, ("cpu", "cuda"), of="the QuantizedKV")
        seqlen = self._seqlen + key.shape[2]
        if seqlen > INT32_MAX - BLOCK:
            raise ArgumentError(f"key has seqlen {key.shape[2]}; at {self._seqlen} keys that is too many")
        if key.shape[2]:
            with _ordinary_tensors():
                self._append(key, value, seqlen)

    def _append(self, key: torch.Tensor, value: torch.Tensor, seqlen: int) -> None:
        """`append` of checked tensors, with which there are `seqlen` keys."""
        cat = sys.modules["torch"].cat
        self._reserve(seqlen)
        if self._values is not None:
            self._values[:, :, self._seqlen : seqlen, : self.head_dim_v] = value
        if self._tail:
            key = cat((self._tail[0], key), 2)
            if self._values is None:
                value = cat((self._tail[1], value), 2)
        full = self._seqlen // BLOCK
        if full == 0:  # all keys are at hand
            self._quantize(self._memory, key, value)
        else:
            self._memory.write_keys(full, key.flatten(0, 1))
            if self._values is None:
                scratch, _ = self._new_memory(whole_blocks(key.shape[2]))
                self._quantize(scratch, key, value)
                self._memory.take_values(scratch, full)
        self._seqlen = seqlen
        self._keep_tail(key, value)

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "a QuantizedKV cannot be copied or pickled: it holds addresses of this process; make another one "
            "with quantize_kv()"
        )

    def __repr__(self) -> str:
        return (
            f"QuantizedKV({self._precision.value}, batch={self.batch}, num_heads_kv={self.num_heads_kv}, "
            f"seqlen_k={self.seqlen_k}, head_dim={self.head_dim}, head_dim_v={self.head_dim_v}, "
            f"dtype={self.dtype}, device={str(self.device)!r})"
        )

    def _problem(self, seqlen: int) -> Problem:
        """One query over `seqlen` keys, for what does not depend on queries."""
        batch, heads, head_dim, head_dim_v = self._shape
        return Problem(
            dtype=checks.DTYPES[dtype_name(self._element)],
            batch=max(batch, 1),
            num_heads_q=max(heads, 1),
            num_heads_kv=max(heads, 1),
            seqlen_q=1,
            seqlen_k=max(seqlen, 1),
            head_dim=padded(head_dim),
            head_dim_v=padded(head_dim_v),
            has_lengths=self._lengths is not None,
        )

    def _find_kernel(self) -> KernelInfo:
        """The kernel whose layout the memory has: of the smallest head_dim. Raises NoKernelError."""
        library, device = self._place
        problem = self._problem(self._seqlen)
        key = self._like(problem.head_dim, Layout.BHSD)
        params = make_params(problem, 1.0, key, key, key, key, None)
        choose(library, problem, self._precision, device, params)  # or says why there is none
        legal = [kernel for kernel, _ in ranking(library, problem, self._precision, device)]
        return min(legal, key=lambda kernel: (kernel.head_dim, kernel.is_split, kernel.name))

    def _new_memory(self, capacity: int) -> tuple[Memory, torch.Tensor | None]:
        """Room for `capacity` keys, and under int8_qk for their values."""
        batch, heads, _, head_dim_v = self._shape
        memory = Memory(self._precision, batch * heads, self._kernel.head_dim, capacity, self.device)
        if self._precision is Precision.INT8:
            return memory, None
        make = self._element.new_empty if head_dim_v == padded(head_dim_v) else self._element.new_zeros
        return memory, make((batch, heads, capacity, padded(head_dim_v)))

    def _reserve(self, seqlen: int) -> None:
        """Makes room for `seqlen` keys in all."""
        capacity = self._memory.capacity
        if seqlen <= capacity:
            return
        memory, values = self._new_memory(max(whole_blocks(seqlen), whole_blocks(capacity * 3 // 2)))
        memory.take(self._memory, whole_blocks(self._seqlen) // BLOCK)
        if values is not None and self._values is not None:
            values[:, :, : self._seqlen] = self._values[:, :, : self._seqlen]
        self._memory, self._values = memory, values

    def _keep_tail(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Copies what the next `append` has to quantise again. `key` and `value` end where sequences do."""
        rest = self._seqlen % BLOCK
        kept = (key, value) if self._values is None else (key,)
        self._tail = tuple(tensor[:, :, tensor.shape[2] - rest :].clone() for tensor in kept if rest)

    def _quantize(self, memory: Memory, key: torch.Tensor, value: torch.Tensor) -> None:
        """Fills `memory` from its first block on, with the mean of these keys."""
        if key.shape[0] == 0 or key.shape[1] == 0 or key.shape[2] == 0:
            return
        k = loadable(key)
        v = loadable(value) if self._values is None else k  # else it is not read
        given = NO_EXTRAS if self._lengths is None else Extras(seqlens_k=self._lengths)
        problem = self._problem(key.shape[2])
        params = make_params(problem, 1.0, k, k, v, k, None, given)
        params.q = params.out = None
        params.workspace, params.workspace_bytes = memory.address, memory.size
        params.total_k = memory.capacity
        params.num_splits = int(self._kernel.is_split)
        self._launch(self._kernel, params, problem)

    def _launch(self, kernel: KernelInfo, params: Params, problem: Problem) -> None:
        """Queues `kernel` on torch's current stream of the device, in a workspace unless `params` has one."""
        library, device = self._place
        is_cuda = device.target is Target.CUDA
        handle = stream_getter()(device.index) if is_cuda else 0
        size = 0 if params.workspace else library.workspace_bytes(kernel.index, params)
        workspace = None
        if size:
            workspace, params.workspace = make_workspace(size, self.device, handle)
            params.workspace_bytes = size
        stream = c_void_p(handle) if is_cuda else None
        status = library.launch_function(kernel.index, ctypes.byref(params), device.index, stream)
        del workspace  # torch's allocator reuses it in stream order
        if status:
            library.check(status, f"{kernel.name} on {problem}")

    def _like(self, columns: int, layout: Layout) -> torch.Tensor:
        """A tensor with the sizes of the keys, or of the values, and one element in all."""
        batch, heads = self._shape[:2]
        return layout.swapped(self._element.expand(batch, heads, self._seqlen, columns))

    def _check_named(self, name: str) -> None:
        """Raises NoKernelError for a kernel of this precision whose memory looks otherwise."""
        for kernel in read_kernels(self._place[0]):
            is_meant = kernel.name == name and kernel.serves(self._precision)
            if is_meant and kernel.head_dim != self._kernel.head_dim:
                raise NoKernelError(
                    f"kernel {name} has head_dim {kernel.head_dim}; key is a QuantizedKV for kernels of "
                    f"head_dim {self._kernel.head_dim}"
                )

    def _attend(
        self,
        problem: Problem,
        scale: float,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        given: Extras,
        name: str | None,
    ) -> None:
        """Attention of `query`, canonical and loadable, to all keys, into `out` and `lse`."""
        library, device = self._place
        key = self._like(problem.head_dim, Layout.BHSD)
        value = key if self._values is None else self._values[:, :, : self._seqlen]
        params = make_params(problem, scale, query, key, value, out, lse, given)
        params.k = None
        if self._values is None:
            params.v = None
        memory = self._memory
        params.total_k = memory.capacity
        params.quantized, params.quantized_bytes = memory.address, memory.size
        if name is not None:
            self._check_named(name)
        # Kernels of other head_dims are refused: what they leave has another size.
        choice = choose(library, problem, self._precision, device, params, name=name)
        params.num_splits = choice.num_splits
        self._launch(choice.kernel, params, problem)


@contextlib.contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """What is made here may be written later, wherever that is, and no gradient is recorded."""
    torch = sys.modules["torch"]
    with torch.inference_mode(False), torch.no_grad():
        yield


@out_of_graphs
def attend(kv: QuantizedKV, options: Options, inputs: Inputs, refused: dict[str, Any]) -> Result:
    """`attention` of inputs.query to `kv`; inputs.key and inputs.value mean nothing.

    `options.family` is what the caller's `precision` asks for. `refused`: arguments that must be None.
    """
    refuse_tracing("key")
    for name, given in refused.items():
        if given is not None:
            raise UnsupportedError(f"{name} is given and key is a QuantizedKV; allowed is to leave it out")
    if options.family not in (Family.FMHA_FWD, kv.precision):
        raise ArgumentError(
            f"precision is {options.family.value!r} and key a QuantizedKV of {kv.precision.value!r}; allowed "
            "is the same, or None"
        )
    query = as_tensor("query", inputs.query)
    out = None if inputs.out is None else as_tensor("out", inputs.out, writable=True)
    refuse_causal_bias(inputs.attn_mask)
    mask = None if inputs.attn_mask is None else as_tensor("attn_mask", inputs.attn_mask)
    sinks = None if inputs.sinks is None else as_tensor("sinks", inputs.sinks)
    seqlens_q = None if inputs.seqlens_q is None else as_tensor("seqlens_q", inputs.seqlens_q)
    if torch_inputs.needs_dispatcher(
        {"query": query, "attn_mask": mask, "sinks": sinks, "out": out}, is_operator=False
    ):
        raise UnsupportedError(
            "query has no memory, as inside torch.func or of a FakeTensorMode, and key is a QuantizedKV, "
            "which torch does not see; call attention outside"
        )
    query = checks.autocast_inputs(query, query, query)[0]
    if query.dtype != kv.dtype:
        raise ArgumentTypeError(f"query has dtype {query.dtype}; key is a QuantizedKV of {kv.dtype}")
    options = torch_inputs.with_flags(options)
    layout = checks.tensor_layout(options.layout)
    inputs = torch_inputs.resolved(
        inputs._replace(
            query=query,
            key=kv._like(kv.head_dim, layout),
            value=kv._like(kv.head_dim_v, layout),
            out=out,
            attn_mask=mask,
            seqlens_q=seqlens_q,
            seqlens_k=kv._lengths,
            sinks=sinks,
        )
    )
    bound = bind(options, inputs)
    operands, problem = bound.operands, bound.problem
    if tuple(operands.key.shape[:2]) != (kv.batch, kv.num_heads_kv):
        raise ArgumentError(
            f"query has shape {tuple(query.shape)}; key is a QuantizedKV of batch {kv.batch} and "
            f"{kv.num_heads_kv} heads, which do not broadcast"
        )
    if out is not None:
        outputs.check_out(out, operands)
        read = {"query": query, "attn_mask": mask, "seqlens_q": seqlens_q, "sinks": sinks}
        outputs.check_no_overlap(out, {name: tensor for name, tensor in read.items() if tensor is not None})
    if problem.is_empty:
        result, lse = execute(bound, options, out, None)[:2]
    else:
        result = outputs.empty_out(operands) if out is None else operands.canonical_out(out)
        lse = outputs.empty_lse(operands) if options.return_lse else None
        written = result
        if problem.head_dim_v != operands.head_dim_v:
            written = result.new_empty((*result.shape[:3], problem.head_dim_v))
        q, given = loadable(operands.query), bound.given
        if given.mask is not None and needs_dense_copy(given.mask, Family.FMHA_FWD_Q8):
            given = given._replace(mask=dense_copy(given.mask))
        kv._attend(problem, bound.scale, q, written, lse, given, options.kernel)
        if written is not result:
            result.copy_(written[..., : operands.head_dim_v])
    if out is not None:
        torch_hooks.increment_version((out,))
    return Result(
        operands.restore(result) if inputs.out is None else inputs.out,
        None if lse is None else operands.restore_lse(lse),
        rng.NO_PHILOX,
    )
