"""Inputs: the committed real ones, reproducible random ones, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sdpa_cutlass.cli import inputs, running
from sdpa_cutlass.cli.suites import mission

CPU = torch.device("cpu")


def test_committed_real_inputs() -> None:
    qkv = inputs.load_qkv(inputs.MINILM)
    assert {(tuple(tensor.shape), tensor.dtype) for tensor in qkv} == {((2, 12, 65, 32), torch.float16)}
    assert inputs.MINILM.stat().st_size < 310_000
    logits = qkv.q.float() @ qkv.k.float().transpose(-1, -2) / 32**0.5
    assert logits.amax() > 20  # peaks that random inputs lack
    case = running.file_case(inputs.MINILM, qkv)
    assert case.name == "real/b2_h12_s65_d32"


def test_random_inputs_depend_on_seed_index_and_problem_only() -> None:
    full, causal = mission()

    def first(case: object, **options: int) -> torch.Tensor:
        return inputs.random_qkv(case, dtype=torch.float16, device=CPU, **{"seed": 0, **options}).q  # type: ignore[arg-type]

    assert torch.equal(first(full), first(full))
    for other in (first(causal), first(full, seed=1), first(full, index=1)):
        assert not torch.equal(first(full), other)
    assert first(full).shape == (1, 8, 512, 64)
    assert abs(first(full).float().std() - 1) < 0.01


GOOD = {name: torch.zeros(1, 4, 8, 32) for name in "qkv"}
REFUSED = {
    "missing": ({"q": GOOD["q"], "keys": GOOD["k"], "v": GOOD["v"]}, "no tensor k; it holds keys, q, v"),
    "rank": (GOOD | {"q": torch.zeros(4, 8, 32)}, r"q is \[4, 8, 32\]"),
    "empty": (GOOD | {"v": torch.zeros(1, 4, 0, 32)}, r"v is \[1, 4, 0, 32\]"),
    "integers": (GOOD | {"k": torch.zeros(1, 4, 8, 32, dtype=torch.int32)}, r"k is torch\.int32"),
    "k and v": (GOOD | {"v": torch.zeros(1, 4, 9, 32)}, "but v is"),
    "heads": (GOOD | {name: torch.zeros(1, 3, 8, 32) for name in "kv"}, "must divide q's"),
    "head_dim": (GOOD | {"q": torch.zeros(1, 4, 8, 64)}, "must agree in batch and head_dim"),
}


@pytest.mark.parametrize(("tensors", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_files(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    save_file(tensors, path)
    with pytest.raises(inputs.InputError, match=message):
        inputs.load_qkv(path)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(inputs.InputError, match="cannot be read"):
        inputs.load_qkv(tmp_path / "absent.safetensors")
    garbage = tmp_path / "garbage.safetensors"
    garbage.write_bytes(b"not safetensors")
    with pytest.raises(inputs.InputError, match="cannot be read"):
        inputs.load_qkv(garbage)
