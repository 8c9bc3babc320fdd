"""What the installed torch has, for tests that compare with what only newer ones do."""

from __future__ import annotations

import torch
import torch.nn.functional as F

HAS_ENABLE_GQA = "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or "")
"""F.scaled_dot_product_attention takes it, as torch does from 2.5 on."""

_ROW = torch.zeros(1, 1, 1, 8)
GIVES_ZERO_WITHOUT_KEYS = bool(
    F.scaled_dot_product_attention(_ROW, _ROW, _ROW, torch.zeros(1, 1, dtype=torch.bool)).eq(0).all()
)
"""A row that sees no key is 0, as in torch from 2.5 on; before, NaN."""
