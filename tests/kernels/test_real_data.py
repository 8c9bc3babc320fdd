"""Every kernel of head_dim 32 on q, k, v that a pretrained encoder computed for real text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kernels.harness import Inputs, TestedKernel
from tests.kernels.numerics import check_numerics

_FILE = Path(__file__).parents[2] / "sdpa_cutlass" / "data" / "minilm_qkv.safetensors"
_HEADS = 3  # of 12: enough to be varied, few enough for the host target


@pytest.fixture(scope="module")
def encoder_inputs() -> Inputs:
    tensors = load_file(_FILE)
    assert tensors["q"].dtype is torch.float16
    return Inputs(*(tensors[name][:, :_HEADS] for name in ("q", "k", "v")))


@pytest.mark.kernels(head_dim=32)
def test_fused(fused_kernel: TestedKernel, encoder_inputs: Inputs) -> None:
    _check(fused_kernel, encoder_inputs)


@pytest.mark.kernels(head_dim=32)
def test_unfused(unfused_kernel: TestedKernel, encoder_inputs: Inputs) -> None:
    _check(unfused_kernel, encoder_inputs)


def _check(kernel: TestedKernel, inputs: Inputs) -> None:
    scaled_v = inputs.v / 16 if kernel.dtype is torch.bfloat16 else inputs.v  # see random_inputs
    tensors = (tensor.to(kernel.device, kernel.dtype) for tensor in (inputs.q, inputs.k, scaled_v))
    check_numerics(kernel, Inputs(*tensors), causal=kernel.alignments[-1])
