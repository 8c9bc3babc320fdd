"""Errors of 8-bit attention without and with a Hadamard rotation of queries and keys.

    python -m benchmarks.rotation [--device cuda] [--json FILE]

Prints the table of docs/quantised.md: relative L2 errors of the worst head over 512 keys, fp16 tensors.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.quantised_data import errors_of_heads, family
from sdpa_cutlass import Precision, attention, quantize_kv
from sdpa_cutlass.cli import environment
from sdpa_cutlass.cli.inputs import MINILM
from sdpa_cutlass.cli.results import write_atomically

HEADS, ROWS, KEYS = 4, 64, 512
HEAD_DIMS = (64, 128)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def hadamard(n: int) -> torch.Tensor:
    """Of size n, a power of two, normalised: its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(n)


def rotary(x: torch.Tensor) -> torch.Tensor:
    """A rotary embedding of the rows' positions, base 10,000."""
    rows, columns = x.shape[-2:]
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-2 * torch.arange(columns // 2) / columns)
    cos, sin = angles.cos(), angles.sin()
    low, high = x[..., : columns // 2], x[..., columns // 2 :]
    return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)


def normal(head_dim: int, rows: int = ROWS) -> Tensors:
    """The last rows of as many queries as keys."""
    generators = [torch.Generator().manual_seed(seed) for seed in (4, 5, 6)]
    q, k, v = (torch.randn(1, HEADS, KEYS, head_dim, generator=one) for one in generators)
    return q[:, :, KEYS - rows :], k, v


def of_family(head_dim: int, kind: str) -> Tensors:
    """Of benchmarks.quantised_data."""
    return family(kind, 1, HEADS, HEADS, ROWS, KEYS, head_dim)


def rotated_bias(head_dim: int, bias: float = 40.0) -> Tensors:
    """Two channels of K in fast-rotating pairs are `bias` for every key, before the rotary embedding."""
    q, k, v = normal(head_dim, KEYS)
    for head in range(HEADS):
        k[0, head, :, [head % 3, head % 3 + 1]] += bias
    return rotary(q)[:, :, -ROWS:], rotary(k), v


def large_channels(head_dim: int) -> Tensors:
    """Two channels of Q are 12 times larger than others, and of K 8 times."""
    q, k, v = normal(head_dim)
    for head in range(HEADS):
        q[0, head, :, 5 * head : 5 * head + 2] *= 12
        k[0, head, :, 5 * head : 5 * head + 2] *= 8
    return q / 4, k, v


def one_large_key(head_dim: int) -> Tensors:
    """The first key is 60 times larger than others."""
    q, k, v = normal(head_dim)
    k[:, :, 0] *= 60
    return q, k, v


def encoder(_: int) -> Tensors:
    """Two layers of the pretrained text encoder."""
    found = load_file(MINILM)
    return found["q"], found["k"], found["v"]


INPUTS: dict[str, tuple[Callable[[int], Tensors], tuple[int, ...]]] = {
    "a bias of 40 in two fast-rotating channels of K": (rotated_bias, HEAD_DIMS),
    "a bias of 10 there": (functools.partial(rotated_bias, bias=10.0), HEAD_DIMS),
    "two channels of Q 12 times larger, of K 8 times": (large_channels, HEAD_DIMS),
    "normal": (normal, HEAD_DIMS),
    "K with constant channels up to ±15": (functools.partial(of_family, kind="kbias"), HEAD_DIMS),
    "logits of standard deviation 4": (functools.partial(of_family, kind="peaky"), HEAD_DIMS),
    "one key 60 times larger": (one_large_key, HEAD_DIMS),
    "the pretrained encoder": (encoder, (32,)),
}


def worst_error(tensors: Tensors, device: str, precision: Precision, matrix: torch.Tensor | None) -> float:
    """Relative L2, of the worst head."""
    q, k, v = (tensor.to(device, torch.float16) for tensor in tensors)
    weights = (q.double() @ k.double().mT / math.sqrt(q.shape[-1])).softmax(-1)
    want = weights @ v.double()
    if matrix is not None:
        h = matrix.to(device)
        q, k = ((tensor.float() @ h).half() for tensor in (q, k))
    out = attention(q, quantize_kv(k, v, precision=precision))
    return errors_of_heads(out, want)[0].max().item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, writes the file."""
    description = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rotation", description=description)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    print("| inputs | D | `int8_qk` | `int8` |\n|---|--:|--:|--:|")
    rows = []
    for what, (make, head_dims) in INPUTS.items():
        for head_dim in head_dims:
            tensors, matrices = make(head_dim), (None, hadamard(head_dim))
            row = {
                precision.value: [worst_error(tensors, options.device, precision, h) for h in matrices]
                for precision in (Precision.INT8_QK, Precision.INT8)
            }
            rows.append({"inputs": what, "head_dim": head_dim, **row})
            cells = [
                " → ".join(f"{error:.1e}" for error in pair).replace("e-0", "e-") for pair in row.values()
            ]
            print(f"| {what} | {head_dim} | {' | '.join(cells)} |")
    if options.json is not None:
        env = environment.record(torch.device(options.device))
        write_atomically(options.json, json.dumps({"env": env, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
