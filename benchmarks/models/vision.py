"""Models of images and sound: ViT, Swin, Whisper, and attention blocks of the shapes of Stable Diffusion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.models.case import Case, of_transformers, scores_of_models, seeded
from benchmarks.models.diffusion import LARGE, SMALL, Blocks
from benchmarks.models.inputs import normal, tensor_run
from tests.models.zoo import Padding, token_batch


def vit(device: str, *, small: bool) -> Iterator[Case]:
    """Images as patches and a class token, all of which see each other."""
    options: dict[str, Any] = {"attn_implementation": "sdpa"}
    if small:
        options |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        options |= {"num_attention_heads": 2, "patch_size": 8}
    options["initializer_range"] = scores_of_models(options.get("hidden_size", 768))
    patch = options.get("patch_size", 16)
    for image in (72,) if small else (224, 384):
        batch = 2 if small else 64
        yield Case(
            family="vit",
            model="ViT small size" if small else f"ViT-B/16 {image}",
            task=f"{batch} × {(image // patch) ** 2 + 1} patches",
            configuration="2 layers, 2 heads of 64"
            if small
            else "vit-base-patch16: 12 layers, 12 heads of 64",
            build=of_transformers("ViTModel", "ViTConfig", device, image_size=image, **options),
            inputs=tensor_run({"pixel_values": normal(batch, 3, image, image)}, "last_hidden_state"),
        )


def swin(device: str, *, small: bool) -> Iterator[Case]:
    """Windows of 7 × 7 patches with a bias each, shifted ones with a mask as well."""
    options: dict[str, Any] = {"attn_implementation": "sdpa", "image_size": 224}
    if small:
        options |= {"image_size": 56, "embed_dim": 64, "depths": [2, 2], "num_heads": [2, 4]}
    options["initializer_range"] = scores_of_models(options.get("embed_dim", 96))
    batch, image = (1 if small else 64), options["image_size"]
    yield Case(
        family="swin",
        model="Swin small size" if small else "Swin tiny",
        task=f"{batch} images of {image}²",
        configuration="2 + 2 layers, heads of 32"
        if small
        else "swin-tiny-patch4-window7-224: 12 layers, heads of 32",
        build=of_transformers("SwinModel", "SwinConfig", device, **options),
        inputs=tensor_run({"pixel_values": normal(batch, 3, image, image)}, "last_hidden_state"),
    )


def whisper(device: str, *, small: bool) -> Iterator[Case]:
    """An encoder of sound and a decoder of text that looks at it."""
    options: dict[str, Any] = {"attn_implementation": "sdpa"}
    if small:
        sizes, heads, layers = {"d_model": 128, "max_source_positions": 80, "vocab_size": 101}, 2, 2
        batch, tokens, name, where = 2, 33, "Whisper small size", "2 + 2 layers, 2 heads of 64"
    else:
        sizes, heads, layers = {"d_model": 768, "max_source_positions": 1500, "vocab_size": 51865}, 12, 12
        batch, tokens, name = 8, 64, "Whisper small"
        where = "whisper-small: 12 + 12 layers, 12 heads of 64"
    options |= sizes | {
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_ffn_dim": 4 * sizes["d_model"],
    }
    options |= {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
    options |= {"decoder_ffn_dim": 4 * sizes["d_model"], "init_std": scores_of_models(sizes["d_model"])}
    options |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    frames = sizes["max_source_positions"]
    ids = token_batch((tokens,) * batch, Padding.NONE, vocabulary=sizes["vocab_size"])["input_ids"]
    yield Case(
        family="whisper",
        model=name,
        task=f"{batch} × {frames} frames, decoder {tokens}",
        configuration=where,
        build=of_transformers("WhisperModel", "WhisperConfig", device, **options),
        inputs=tensor_run(
            {"input_features": normal(batch, 80, 2 * frames), "decoder_input_ids": ids}, "last_hidden_state"
        ),
    )


def diffusion(device: str, *, small: bool) -> Iterator[Case]:
    """Self-attention over pixels and cross-attention over 77 text tokens, at each level of a U-Net."""
    shape = SMALL if small else LARGE
    for batch in (1,) if small else (2, 8):
        latents = normal(batch, shape.channels[0], shape.side, shape.side)
        text = normal(batch, shape.text_tokens, shape.text_width, seed=1)
        yield Case(
            family="diffusion",
            model="Stable-Diffusion-like" + (", small size" if small else ""),
            task=f"{batch} × {shape.side}² latents, 77 text tokens",
            configuration=shape.configuration,
            build=lambda: seeded(Blocks, shape, device=device),
            inputs=tensor_run({"latents": latents, "text": text}, "sample"),
            own_attention=None,
        )
