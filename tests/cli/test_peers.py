"""Other libraries: each adapter against a stand-in with the documented signature, checking its layouts."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdpa_cutlass.cli import peers
from sdpa_cutlass.cli.accuracy import naive_attention
from sdpa_cutlass.cli.conditions import make_conditions
from sdpa_cutlass.cli.inputs import QKV, random_qkv
from sdpa_cutlass.cli.providers import Operands
from sdpa_cutlass.cli.results import PEERS
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.problem import Causal

CPU = torch.device("cpu")


def attention(q: Any, k: Any, v: Any, *, causal: bool, offset: int) -> torch.Tensor:
    """[B, H, S, D], grouped heads and all."""
    return naive_attention(QKV(q, k, v), causal=causal, offset=offset)


def heads_last(q: Any, k: Any, v: Any, *, causal: bool, right: bool = True) -> torch.Tensor:
    """[B, S, H, D]; causal masks are aligned to the last key when `right`."""
    offset = k.shape[1] - q.shape[1] if right else 0
    tensors = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return attention(*tensors, causal=causal, offset=offset).transpose(1, 2)


def ragged(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, *, causal: bool) -> torch.Tensor:
    """[total, H, D], sequence by sequence."""
    parts = []
    for number in range(len(starts_q) - 1):
        some = slice(int(starts_q[number]), int(starts_q[number + 1]))
        keys = slice(int(starts_k[number]), int(starts_k[number + 1]))
        parts.append(heads_last(q[some][None], k[keys][None], v[keys][None], causal=causal)[0])
    return torch.cat(parts)


def flash(*, with_lse: bool) -> dict[str, Callable[..., Any]]:
    def flash_attn_func(q: Any, k: Any, v: Any, dropout_p: float = 0.0, causal: bool = False) -> Any:
        out = heads_last(q, k, v, causal=causal)
        return (out, None) if with_lse else out

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool = False,
    ) -> Any:
        out = ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal)
        return (out, None) if with_lse else out

    return {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}


class Lower:
    right = False


class LowerRight:
    right = True


@dataclasses.dataclass
class BlockDiagonal:
    lengths: list[int]
    causal: bool = False

    @classmethod
    def from_seqlens(cls, lengths: list[int]) -> BlockDiagonal:
        assert all(type(length) is int for length in lengths)
        return cls(lengths)

    def make_causal(self) -> BlockDiagonal:
        return BlockDiagonal(self.lengths, True)


def xformers(q: Any, k: Any, v: Any, attn_bias: Any = None, p: float = 0.0) -> torch.Tensor:
    if q.dim() == 5:  # [B, S, groups, heads of a group, D]: every head of a group has the same keys
        assert (k[..., :1, :] == k).all()
        q, k, v = q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)
        return xformers(q, k, v, attn_bias, p).unflatten(2, (2, -1))
    assert q.shape[2] == k.shape[2], "grouped heads need five dimensions"
    if isinstance(attn_bias, BlockDiagonal):
        starts = torch.tensor([0, *attn_bias.lengths]).cumsum(0)
        return ragged(q[0], k[0], v[0], starts, starts, causal=attn_bias.causal)[None]
    right = attn_bias is not None and attn_bias.right
    return heads_last(q, k, v, causal=attn_bias is not None, right=right)


class Prefill:
    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")

    def plan(
        self, qo: Any, kv: Any, heads: int, heads_kv: int, size: int, causal: bool, q_data_type: Any
    ) -> None:
        assert qo.dtype == kv.dtype == torch.int32
        self.planned = (qo, kv, heads, heads_kv, size, causal, q_data_type)

    def run(self, q: Any, k: Any, v: Any) -> torch.Tensor:
        qo, kv, *sizes, causal, dtype = self.planned
        assert [q.shape[1], k.shape[1], q.shape[2]] == sizes
        assert q.dtype is dtype
        return ragged(q, k, v, qo, kv, causal=causal)


class Decode:
    def __init__(self, workspace: torch.Tensor, layout: str, *, use_tensor_cores: bool) -> None:
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        first: Any,
        indices: Any,
        last: Any,
        heads: int,
        heads_kv: int,
        size: int,
        page: int,
        *,
        q_data_type: Any,
        kv_data_type: Any,
    ) -> None:
        assert self.use_tensor_cores == (heads > heads_kv)
        self.planned = (first, indices, last, page)

    def run(self, q: Any, cache: Any) -> torch.Tensor:
        first, indices, last, page = self.planned
        assert (last == page).all()
        outs = []
        for number in range(len(first) - 1):
            pages = indices[int(first[number]) : int(first[number + 1])].long()
            k, v = (part[pages].flatten(0, 1)[None] for part in cache)
            outs.append(heads_last(q[number][None, None], k, v, causal=False)[0, 0])
        return torch.stack(outs)


def sage(q: Any, k: Any, v: Any, tensor_layout: str, is_causal: bool) -> torch.Tensor:
    assert tensor_layout == "HND"
    return attention(q, k, v, causal=is_causal, offset=0)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer, as a module that torch alone computes."""
    contents: dict[str, dict[str, Any]] = {
        "flash_attn": flash(with_lse=False) | {"__version__": "2.8.3"},
        "flash_attn.cute": flash(with_lse=True),
        "flash_attn_interface": flash(with_lse=True),
        "xformers": {},
        "xformers.ops": {"memory_efficient_attention_forward": xformers},
        "xformers.ops.fmha": {},
        "xformers.ops.fmha.attn_bias": {
            "LowerTriangularMask": Lower,
            "LowerTriangularFromBottomRightMask": LowerRight,
            "BlockDiagonalMask": BlockDiagonal,
        },
        "flashinfer": {
            "BatchPrefillWithRaggedKVCacheWrapper": Prefill,
            "BatchDecodeWithPagedKVCacheWrapper": Decode,
        },
        "sageattention": {"sageattn": sage},
    }
    for name, members in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)


FULL = Case(
    suite="t", batch=2, num_heads_q=4, num_heads_kv=4, seqlen_q=48, seqlen_k=48, head_dim=32, causal=False
)
RIGHT = dataclasses.replace(FULL, seqlen_q=5, causal=True, alignment=Causal.BOTTOM_RIGHT)
CASES = {
    "full": FULL,
    "causal": dataclasses.replace(FULL, causal=True),
    "grouped": dataclasses.replace(FULL, num_heads_kv=2),
    "one query": dataclasses.replace(FULL, num_heads_kv=2, seqlen_q=1),
    "bottom_right": dataclasses.replace(RIGHT, num_heads_kv=2),
    "packed": dataclasses.replace(FULL, mask="packed"),
    "packed causal": dataclasses.replace(FULL, mask="packed", causal=True),
}


def operands_of(case: Case) -> Operands:
    qkv = random_qkv(case, dtype=torch.float16, device=CPU, seed=0)
    qkv = QKV(*(tensor.float() for tensor in qkv))
    conditions = make_conditions(case, dtype=torch.float16, device=CPU, seed=0)
    return Operands(qkv, conditions, conditions.pack(qkv) if conditions.is_packed else None)


def expected(case: Case, operands: Operands) -> torch.Tensor:
    offset = case.problem().causal_offset
    mask = operands.conditions.mask
    out = naive_attention(operands.qkv, causal=case.causal, offset=offset, mask=mask)
    return out if operands.packed is None else out.transpose(1, 2)[operands.conditions.real]


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_peers_compute_the_problem(case: Case, name: str, installed: None) -> None:
    found, _ = peers.find()
    operands = operands_of(case)
    refused = name == "sageattention" and (case.mask == "packed" or case is CASES["bottom_right"])
    if refused:
        with pytest.raises(NotImplementedError):
            found[name].bind(case, operands)
        return
    out = found[name].bind(case, operands)()
    torch.testing.assert_close(out, expected(case, operands))


TOP_LEFT = dataclasses.replace(RIGHT, alignment=Causal.TOP_LEFT)
REFUSED = {
    "padding": (dataclasses.replace(FULL, mask="padding"), PEERS),
    "dropout": (
        dataclasses.replace(FULL, p_dropout=0.1),
        ("flash_attn_3", "flash_attn_4", "flashinfer", "sageattention"),
    ),
    "top_left": (TOP_LEFT, ("flash_attn", "flash_attn_3", "flash_attn_4", "flashinfer", "sageattention")),
}


@pytest.mark.parametrize(("case", "names"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_be_another_problem_is_refused(
    case: Case, names: tuple[str, ...], installed: None
) -> None:
    found, _ = peers.find()
    operands = operands_of(case)
    for name in names:
        with pytest.raises(NotImplementedError):
            found[name].bind(case, operands)


def test_xformers_has_both_alignments(installed: None) -> None:
    out = peers.find()[0]["xformers"].bind(TOP_LEFT, operands_of(TOP_LEFT))()
    torch.testing.assert_close(out, expected(TOP_LEFT, operands_of(TOP_LEFT)))


def test_versions_are_known(installed: None) -> None:
    found, about = peers.find()
    assert tuple(found) == tuple(about) == PEERS
    assert about["flash_attn"] == "2.8.3"
    assert about["sageattention"] == "version unknown"
    assert [name for name, provider in found.items() if provider.is_quantised] == ["sageattention"]


def test_what_is_absent_or_broken_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(name: str) -> Any:
        if name == "flash_attn":
            raise ImportError("undefined symbol: _ZN3c10\nmore")
        if name == "xformers.ops":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        if name == "flash_attn.cute":
            return types.ModuleType(name)  # a namespace without the function
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", fake)
    found, about = peers.find()
    assert found == {}
    assert about["flash_attn"] == "cannot be imported: ImportError: undefined symbol: _ZN3c10"
    assert about["xformers"] == "cannot be imported: needs triton"
    assert about["flash_attn_4"].startswith("cannot be imported: AttributeError: ")
    assert about["sageattention"] == about["flashinfer"] == "not installed"
