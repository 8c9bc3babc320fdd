"""What the tests of the public functions share: seeded tensors, and torch's answer in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rand(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    """Seeded normal values."""
    generator = torch.Generator().manual_seed(seed + len(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def decoding(device: str, seed: int = 0, keys: int = 3000) -> list[torch.Tensor]:
    """q, k and v of a few rows and so many keys that several CTAs share those of a tile."""
    shapes = [(1, 8, 2, 64), (1, 2, keys, 64), (1, 2, keys, 64)]
    return [rand(*shape, device=device, seed=3 * seed + i) for i, shape in enumerate(shapes)]


def torchs_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    """torch's own, in float32; a float mask too, and zeros where torch has NaN because a row sees no key.

    Under `enable_gqa` key heads are repeated, since torch 2.4 does not know it.
    """
    if options.pop("enable_gqa", False):
        k, v = (tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], -3) for tensor in (k, v))
    mask = options.get("attn_mask")
    if isinstance(mask, torch.Tensor) and mask.is_floating_point():
        options["attn_mask"] = mask.float()
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).nan_to_num(0)


def expect_close(out: torch.Tensor, reference: torch.Tensor) -> None:
    """Half precision's distance from float32, and the same shape."""
    assert out.shape == reference.shape
    torch.testing.assert_close(out.float(), reference.float(), atol=3e-3, rtol=3e-3)


def softmax_lse(
    q: torch.Tensor, k: torch.Tensor, *, attn_mask: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor:
    """The log-sum-exp of every row, in float32, for as many heads in k as in q."""
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.float()
    return scores.logsumexp(-1)
