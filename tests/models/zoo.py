"""Models of the transformers library, built from a config with random weights, and inputs for them.

Shared by these tests and benchmarks/models. Attention is by F.scaled_dot_product_attention. The weights
are drawn so that scores have a standard deviation of about 1.7, whatever the width: rows attend to few keys,
and a wrong mask or alignment moves the logits far beyond rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

VOCABULARY = 101
PAD = 0


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a model's attention layers."""

    head_dim: int
    num_heads_q: int = 2
    num_heads_kv: int = 2
    layers: int = 2

    @property
    def width(self) -> int:
        """Channels between the layers."""
        return self.head_dim * self.num_heads_q

    def __str__(self) -> str:
        heads = f"{self.num_heads_q}/{self.num_heads_kv}"
        return f"d{self.head_dim} h{heads.removesuffix(f'/{self.num_heads_q}')} l{self.layers}"


class Padding(Enum):
    """Where the shorter sequences of a batch are filled up; NONE: all are equally long."""

    NONE = "none"
    LEFT = "left"
    RIGHT = "right"


def _common(size: Size) -> dict[str, Any]:
    return {
        "attn_implementation": "sdpa",
        "initializer_range": 1.3 / math.sqrt(size.width),
    }


def llama(size: Size, *, max_length: int = 128) -> torch.nn.Module:
    """A Llama with grouped query heads, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _seeded(
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=size.width,
            intermediate_size=2 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.num_heads_q,
            num_key_value_heads=size.num_heads_kv,
            head_dim=size.head_dim,
            max_position_embeddings=max_length,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=PAD,
            **_common(size),
        ),
    )


def gpt2(size: Size, *, max_length: int = 128) -> torch.nn.Module:
    """A GPT-2, in float32; its dropout is on in training mode, on attention only."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _seeded(
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=max_length,
            n_embd=size.width,
            n_layer=size.layers,
            n_head=size.num_heads_q,
            attn_pdrop=0.2,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            tie_word_embeddings=False,  # else the likeliest next token is mostly the last one again
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=PAD,
            **_common(size),
        ),
    )


def vit(size: Size, *, image_size: int = 48, patch_size: int = 8) -> torch.nn.Module:
    """A ViT classifier, in float32; it attends over (image_size / patch_size)² + 1 tokens."""
    from transformers import ViTConfig, ViTForImageClassification

    return _seeded(
        ViTForImageClassification,
        ViTConfig(
            image_size=image_size,
            patch_size=patch_size,
            hidden_size=size.width,
            intermediate_size=2 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.num_heads_q,
            num_labels=10,
            **_common(size),
        ),
    )


def mistral(size: Size, *, window: int, max_length: int = 128) -> torch.nn.Module:
    """A Mistral whose rows see `window` keys, their own included, in float32."""
    from transformers import MistralConfig, MistralForCausalLM

    return _seeded(
        MistralForCausalLM,
        MistralConfig(
            vocab_size=VOCABULARY,
            hidden_size=size.width,
            intermediate_size=2 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.num_heads_q,
            num_key_value_heads=size.num_heads_kv,
            head_dim=size.head_dim,
            sliding_window=window,
            max_position_embeddings=max_length,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=PAD,
            **_common(size),
        ),
    )


def set_attention(model: torch.nn.Module, name: str) -> None:
    """`model.set_attn_implementation(name)`, which transformers 4.53 does not have."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(name)
    else:
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = name


def gpt_oss(size: Size, *, window: int, max_length: int = 128) -> torch.nn.Module:
    """A gpt-oss in float32: a sink for each query head, every other layer with a window, two experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return _seeded(
        GptOssForCausalLM,
        GptOssConfig(
            vocab_size=VOCABULARY,
            hidden_size=size.width,
            intermediate_size=size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.num_heads_q,
            num_key_value_heads=size.num_heads_kv,
            head_dim=size.head_dim,
            sliding_window=window,
            num_local_experts=2,
            num_experts_per_tok=2,  # all of them: rounding cannot change which ones compute
            max_position_embeddings=max_length,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=PAD,
            **{**_common(size), "attn_implementation": "eager"},
        ),
    )


def _seeded(model: Callable[[Any], torch.nn.Module], config: Any) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model(config).eval()


def token_batch(
    lengths: Sequence[int], padding: Padding, *, vocabulary: int = VOCABULARY, seed: int = 0
) -> dict[str, torch.Tensor]:
    """input_ids [B, longest] and, where there is padding, attention_mask of sequences with `lengths` tokens.

    Without padding, every sequence has the longest one's length.
    """
    longest = max(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(PAD + 1, vocabulary, (len(lengths), longest), generator=generator)
    if padding is Padding.NONE:
        return {"input_ids": ids}
    position = torch.arange(longest)
    if padding is Padding.LEFT:
        position = position.flip(0)
    kept = position < torch.tensor(lengths)[:, None]
    return {"input_ids": ids.masked_fill(~kept, PAD), "attention_mask": kept.long()}


def images(batch: int, *, image_size: int = 48, seed: int = 0) -> torch.Tensor:
    """[batch, 3, image_size, image_size] float32, of values that float16 and bfloat16 hold exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 129, (batch, 3, image_size, image_size), generator=generator) / 64
