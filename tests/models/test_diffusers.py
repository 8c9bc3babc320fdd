"""Models of diffusers give the same under sdpa_cutlass.enabled() as with torch, with every call served.

diffusers calls `F.scaled_dot_product_attention`; its own list of attention backends is a closed enumeration,
so that nothing else can be registered there, which a test holds too. It is no dependency of the tests: where
it is not installed, they skip. Weights are random.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import sdpa_cutlass
from tests.models import agreement

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

Run = Callable[[torch.nn.Module], torch.Tensor]


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unet(device: str) -> tuple[torch.nn.Module, Run, int]:
    """A U-Net with self- and cross-attention, 2 heads of 32, at 256 pixels and 77 text tokens."""
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=96,
        attention_head_dim=2,  # how many heads, for a U-Net
        norm_num_groups=16,
    )
    pixels, text = drawn(1, 4, 16, 16, seed=1), drawn(1, 77, 96, seed=2)

    def run(model: torch.nn.Module) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        step = torch.tensor([3], device=device)
        return model(pixels.to(device, dtype), step, text.to(device, dtype)).sample

    return model, run, 8  # blocks: one down, one in the middle, two up; two calls each


def transformer(device: str) -> tuple[torch.nn.Module, Run, int]:
    """A transformer like Flux: joint attention of 16 patches and 8 text tokens, 2 heads of 16."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    pixels, text, pooled = drawn(1, 16, 4, seed=1), drawn(1, 8, 32, seed=2), drawn(1, 32, seed=3)

    def run(model: torch.nn.Module) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        return model(
            hidden_states=pixels.to(device, dtype),
            encoder_hidden_states=text.to(device, dtype),
            pooled_projections=pooled.to(device, dtype),
            timestep=torch.ones(1, device=device, dtype=dtype),
            img_ids=torch.zeros(16, 3, device=device),
            txt_ids=torch.zeros(8, 3, device=device),
        ).sample

    return model, run, 2


@pytest.mark.parametrize("make", [unet, transformer], ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_models_agree(
    make: Callable[[str], tuple[torch.nn.Module, Run, int]], dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    model, run, calls = make(device)
    agreement.check(agreement.measure(model.eval(), run, dtype=dtype, device=device), calls=calls)


def test_its_own_list_of_backends_is_closed() -> None:
    """Where this fails, diffusers takes other names: register one, and say so in docs/migration.md."""
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no list")
    model, _, _ = transformer("cpu")
    with pytest.raises(ValueError, match="must be one of"):
        model.set_attention_backend("sdpa_cutlass")
    with pytest.raises(ValueError, match="is not registered"), dispatch.attention_backend("sdpa_cutlass"):
        pass


@pytest.mark.parametrize(
    ("backend", "reasons"), [("native", []), ("_native_math", ["backends named by sdpa_kernel"])]
)
def test_its_native_backend_is_served(backend: str, reasons: list[str], device: str) -> None:
    """Whoever chooses one of torch's backends by name gets that one."""
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no list")
    model, run, calls = transformer(device)
    model = model.eval().to(device, torch.float16)
    chosen = dispatch.attention_backend(backend)
    with torch.no_grad(), sdpa_cutlass.enabled(devices=[device]) as usage, chosen:
        run(model)
    assert usage.served == (0 if reasons else calls)
    assert list(usage.fallbacks) == reasons
