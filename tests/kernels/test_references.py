"""What kernels are compared with: products of float16, results that are kept, a row's largest weight."""

from __future__ import annotations

import torch

from tests.kernels.general import Case
from tests.kernels.general_numerics import expected
from tests.kernels.numerics import Latest, matmul


def test_products_of_float16_are_torchs() -> None:
    """But for the order of the sums, which float32 takes without a visible difference in most elements."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, *shape, generator=draw).half() for shape in ((33, 64), (64, 70)))
    found, torchs = matmul(a, b), a @ b
    assert found.dtype is torch.float16
    assert (found == torchs).float().mean() > 0.99
    torch.testing.assert_close(found, torchs, rtol=2**-10, atol=2**-10)
    assert matmul(1000 * a, 1000 * b).isinf().any()
    assert torch.equal(matmul(a.double(), b.double()), a.double() @ b.double())


def test_a_result_is_kept_until_something_is_written() -> None:
    calls = []
    latest = Latest(lambda case, scale: calls.append(None) or scale * case.q.sum().item())
    q, k, v = (torch.ones(1, 1, 2, 8) for _ in range(3))
    case = Case(q=q, k=k, v=v)
    assert [latest(case, 2), latest(case, 2)] == [32, 32]
    assert len(calls) == 1
    case.q[:, :, 0] = 3  # a view: the tensor's own version counts
    assert latest(case, 2) == 64
    assert latest(case, 1) == 32
    assert latest(Case(q=q, k=k, v=v), 1) == 32
    assert len(calls) == 4


def test_the_largest_weight_of_a_row() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8, generator=draw) for _ in range(3))
    weights = (q.double() @ k.double().mT / 8**0.5).softmax(-1)
    found = expected(Case(q=q, k=k, v=v, p_dropout=0.5)).largest_weight
    torch.testing.assert_close(found, weights.amax(-1, keepdim=True))
