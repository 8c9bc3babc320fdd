"""The process that ncu watches: `python -m sdpa_cutlass.cli.profiling.child TASK` runs one kernel twice.

The first call loads the code and fills the caches, the second one is profiled. Inputs are those of the
benchmarks: standard normal, seeded. A backward kernel follows a forward, which is run once.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

from sdpa_cutlass.choice.select import FORCE_VARIABLE
from sdpa_cutlass.cli import conditions, inputs, providers
from sdpa_cutlass.cli.profiling.problems import Task, parse_shape

BACKWARD = "fmha_bwd"  # what the names of backward kernels begin with


def bind(task: Task, device: str) -> providers.OwnCall:
    """The call of this library that solves the task's problem on `device`."""
    import torch

    case = parse_shape(task.shape)
    where, dtype = torch.device(device), inputs.torch_dtype(task.dtype)
    found = conditions.make_conditions(case, dtype=dtype, device=where, seed=0)
    qkv = inputs.random_qkv(case, dtype=dtype, device=where, seed=0)
    operands = providers.Operands(qkv, found, found.pack(qkv) if found.is_packed else None)
    return providers.own_call(providers.ALL["fused"], case, operands)


def bind_backward(task: Task, device: str) -> Callable[[], object]:
    """What makes dq, dk and dv of the task's problem on `device`, with the task's kernel.

    It has to be this process's first choice of a kernel, since that reads what is forced.
    """
    import torch

    os.environ[FORCE_VARIABLE] = task.kernel  # the forward has kernels of another family
    call = bind(task, device)
    leaves = [tensor.requires_grad_() for tensor in call.tensors[:3]]
    out = call()
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def choose(task: Task, device: str) -> str:
    """The kernel that the library chooses for the task's problem on `device`; nothing is launched."""
    import torch

    case = parse_shape(task.shape)
    where, dtype = torch.device(device), inputs.torch_dtype(task.dtype)
    found = conditions.make_conditions(case, dtype=dtype, device=where, seed=0)
    q = torch.empty(case.batch, case.num_heads_q, case.seqlen_q, case.head_dim, dtype=dtype, device=where)
    k = torch.empty(case.batch, case.num_heads_kv, case.seqlen_k, case.head_dim, dtype=dtype, device=where)
    qkv = inputs.QKV(q, k, k)
    operands = providers.Operands(qkv, found, found.pack(qkv) if found.is_packed else None)
    name = providers.kernel_name(providers.ALL["fused"], case, operands)
    assert name is not None
    return name


def main(argv: list[str]) -> int:
    """Runs the task in `argv`."""
    import torch

    task = Task.from_json(argv[0])
    if task.kernel.startswith(BACKWARD):
        run = bind_backward(task, "cuda:0")
    else:
        run = functools.partial(bind(task, "cuda:0"), kernel=task.kernel)
    for _ in range(2):
        run()
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
