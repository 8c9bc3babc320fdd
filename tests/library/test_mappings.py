"""Each row of the table of mappings in docs/edge-cases.md gives what torch's own kernel gives."""

from __future__ import annotations

import pytest

from tests.library.mappings import MAPPINGS
from tests.library.torch_features import GIVES_ZERO_WITHOUT_KEYS, HAS_ENABLE_GQA

OTHERWISE_IN_2_4 = {
    "sdpa_enable_gqa": "there is no such argument",
    "flash_for_cpu_is_causal": "softmax_lse has less than float32's precision",
}
NAN_WITHOUT_KEYS = {"sdpa_boolean_mask", "causal_lower_right", "flash_attn_causal", "flash_attn_window_size"}


@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.usefixtures("_torch_is_left_as_found")
def test_row(name: str, device: str) -> None:
    if name in OTHERWISE_IN_2_4 and not HAS_ENABLE_GQA:
        pytest.skip(f"torch before 2.5: {OTHERWISE_IN_2_4[name]}")
    if name in NAN_WITHOUT_KEYS and not GIVES_ZERO_WITHOUT_KEYS:
        pytest.skip("torch before 2.5 gives NaN in rows without keys")
    MAPPINGS[name].check(device)
