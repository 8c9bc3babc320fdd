"""Models of text: BERT, Llama, Gemma, Mistral, GPT-2, gpt-oss, T5.

`large`: sizes of public configurations, for a GPU; `small`: the same shapes of attention, seconds on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.models.case import Case, Mode, of_transformers, scores_of_models
from benchmarks.models.inputs import generation_run, text_run
from tests.models.generation import CACHES
from tests.models.zoo import PAD, Padding, token_batch

SMALL_VOCABULARY = 101
LARGE_LENGTHS = (2048, 1500, 1025, 333)


def _special() -> dict[str, Any]:
    return {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": PAD}


def _decoder(
    family: str,
    name: str,
    configuration: str,
    classes: tuple[str, str],
    options: dict[str, Any],
    device: str,
    *,
    lengths: tuple[int, ...],
    prompts: tuple[int, ...] = (),
    new_tokens: int = 0,
    paddings: tuple[Padding, ...] = (Padding.NONE, Padding.LEFT),
    **more: Any,
) -> Iterator[Case]:
    """Logits without and with padding; where there are prompts, generation with both caches."""
    vocabulary = options["vocab_size"]
    build = of_transformers(*classes, device, **_special(), **options)
    common: dict[str, Any] = {
        "family": family,
        "model": name,
        "configuration": configuration,
        "build": build,
        **more,
    }
    for padding in paddings:
        batch = token_batch(lengths, padding, vocabulary=vocabulary)
        word = "" if padding is Padding.NONE else f", {padding.value} padding"
        yield Case(
            task=f"prefill {len(lengths)} × {max(lengths)}{word}",
            inputs=text_run(batch, "logits", use_cache=False),
            **common,
        )
    for cache in CACHES if prompts else ():
        batch = token_batch(prompts, Padding.LEFT, vocabulary=vocabulary)
        yield Case(
            task=f"{new_tokens} tokens, {'growing' if cache == 'dynamic' else cache} cache",
            inputs=generation_run(batch, new_tokens=new_tokens, cache=cache, vocabulary=vocabulary),
            **common | {"modes": (Mode.EAGER,)},
        )


def _grouped(width: int, hidden: int, heads: tuple[int, int], head_dim: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "initializer_range": scores_of_models(width),
    }


def bert(device: str, *, small: bool) -> Iterator[Case]:
    """An encoder whose texts have unequal lengths."""
    options: dict[str, Any] = {"attn_implementation": "sdpa"}
    lengths: tuple[int, ...]
    if small:
        options |= {"vocab_size": SMALL_VOCABULARY, "hidden_size": 128, "intermediate_size": 256}
        options |= {"num_hidden_layers": 2, "num_attention_heads": 2}
        lengths, configuration = (75, 40, 9), "2 layers, 2 heads of 64"
    else:
        lengths = tuple(512 - 13 * i for i in range(32))
        configuration = "bert-base-uncased: 12 layers, 12 heads of 64"
    options["initializer_range"] = scores_of_models(options.get("hidden_size", 768))
    build = of_transformers("BertModel", "BertConfig", device, **options)
    vocabulary = options.get("vocab_size", 30522)
    for padding in (Padding.RIGHT, Padding.NONE):
        word = f"padded to {max(lengths)}" if padding is Padding.RIGHT else f"of {max(lengths)} tokens"
        yield Case(
            family="bert",
            model="BERT small" if small else "BERT base",
            task=f"{len(lengths)} texts {word}",
            configuration=configuration,
            build=build,
            inputs=text_run(token_batch(lengths, padding, vocabulary=vocabulary), "last_hidden_state"),
        )


def llama(device: str, *, small: bool) -> Iterator[Case]:
    """Decoders with grouped heads and rotary embeddings, of head_dim 64, 128 and 256."""
    classes = "LlamaForCausalLM", "LlamaConfig"
    if small:
        options = _grouped(128, 256, (4, 2), 32, 2) | {"vocab_size": SMALL_VOCABULARY}
        options["max_position_embeddings"] = 256
        sizes: dict[str, Any] = {"lengths": (75, 9), "prompts": (21, 2), "new_tokens": 3}
        yield from _decoder(
            "llama", "Llama small", "2 layers, 4/2 heads of 32", classes, options, device, **sizes
        )
        return
    options = _grouped(2048, 8192, (32, 8), 64, 16) | {"vocab_size": 128256, "tie_word_embeddings": True}
    options |= {"max_position_embeddings": 8192}
    sizes = {"lengths": LARGE_LENGTHS, "prompts": (512, 400, 300, 5), "new_tokens": 32}
    where = "Llama-3.2-1B: 16 layers, 32/8 heads of 64"
    yield from _decoder("llama", "Llama 1B", where, classes, options, device, **sizes)
    options = _grouped(4096, 14336, (32, 8), 128, 4) | {"vocab_size": 128256}
    options |= {"max_position_embeddings": 8192}
    where = "Llama-3.1-8B: 4 of 32 layers, 32/8 heads of 128"
    yield from _decoder("llama", "Llama 8B, 4 layers", where, classes, options, device, **sizes)
    options = _grouped(2048, 16384, (8, 1), 256, 4) | {"vocab_size": 256000}
    where = "Gemma-2B: 4 of 18 layers, 8/1 heads of 256"
    classes = "GemmaForCausalLM", "GemmaConfig"
    yield from _decoder("llama", "Gemma 2B, 4 layers", where, classes, options, device, **sizes)


def mistral(device: str, *, small: bool) -> Iterator[Case]:
    """A decoder whose rows see a window of keys."""
    classes = "MistralForCausalLM", "MistralConfig"
    if small:
        options = _grouped(128, 256, (4, 2), 32, 2) | {"vocab_size": SMALL_VOCABULARY, "sliding_window": 24}
        sizes: dict[str, Any] = {"lengths": (75, 9), "prompts": (29, 2), "new_tokens": 3}
        name, where = "Mistral small", "2 layers, 4/2 heads of 32, a window of 24"
    else:
        options = _grouped(4096, 14336, (32, 8), 128, 4) | {"vocab_size": 32000, "sliding_window": 4096}
        sizes = {"lengths": (8192,), "prompts": (4200,), "new_tokens": 32, "paddings": (Padding.NONE,)}
        name, where = (
            "Mistral 7B, 4 layers",
            "Mistral-7B-v0.1: 4 of 32 layers, 32/8 heads of 128, a window of 4096",
        )
        options["max_position_embeddings"] = 32768
    yield from _decoder("mistral", name, where, classes, options, device, **sizes)


def gpt2(device: str, *, small: bool) -> Iterator[Case]:
    """A decoder with learned positions."""
    classes = "GPT2LMHeadModel", "GPT2Config"
    options: dict[str, Any] = {
        "tie_word_embeddings": False
    }  # else the likeliest token is mostly the last one
    if small:
        options |= {
            "vocab_size": SMALL_VOCABULARY,
            "n_positions": 256,
            "n_embd": 128,
            "n_layer": 2,
            "n_head": 2,
        }
        sizes: dict[str, Any] = {"lengths": (75, 9), "prompts": (21, 2), "new_tokens": 3}
        name, where = "GPT-2 small size", "2 layers, 2 heads of 64"
    else:
        options |= {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
        sizes = {"lengths": (1024, 900, 700, 513, 400, 333, 64, 17)}
        sizes |= {"prompts": (512, 400, 300, 5), "new_tokens": 32}
        name, where = "GPT-2", "gpt2: 12 layers, 12 heads of 64"
    options["initializer_range"] = scores_of_models(options["n_embd"])
    yield from _decoder("gpt2", name, where, classes, options, device, **sizes)


def gpt_oss(device: str, *, small: bool) -> Iterator[Case]:
    """A decoder with a sink for each query head and a window in every other layer.

    transformers gives it no sdpa attention: `enable` sees no call of it, the attention interface does. Every
    expert computes: else rounding would choose others, and the errors would be theirs.
    """
    classes = "GptOssForCausalLM", "GptOssConfig"
    common = {"attn_implementation": "eager", "num_local_experts": 2, "num_experts_per_tok": 2}
    if small:
        options = _grouped(128, 128, (4, 2), 32, 2) | {"vocab_size": SMALL_VOCABULARY, "sliding_window": 24}
        sizes: dict[str, Any] = {"lengths": (75, 9), "prompts": (29, 2), "new_tokens": 3}
        name, where = (
            "gpt-oss small",
            "2 layers, 4/2 heads of 32, a window of 24, 2 experts, all of them used",
        )
    else:
        options = _grouped(2880, 2880, (64, 8), 64, 4) | {"vocab_size": 201088, "sliding_window": 128}
        sizes = {"lengths": LARGE_LENGTHS, "prompts": (512, 400, 300, 5), "new_tokens": 32}
        name = "gpt-oss 20B, 4 layers"
        where = "gpt-oss-20b: 4 of 24 layers, 64/8 heads of 64, a window of 128; 2 of 32 experts, both used"
    yield from _decoder(
        "gpt_oss",
        name,
        where,
        classes,
        options | common,
        device,
        **sizes,
        own_attention="eager",
        takes_sdpa=False,
        dtypes=("f16",),  # rounding to bfloat16 weights the experts otherwise, with every attention
    )


def t5(device: str, *, small: bool) -> Iterator[Case]:
    """An encoder and a decoder whose scores get a bias by relative position, [1, heads, Sq, Sk]."""
    if small:
        options: dict[str, Any] = {"vocab_size": SMALL_VOCABULARY, "d_model": 128, "d_kv": 32, "d_ff": 256}
        options |= {"num_layers": 2, "num_heads": 4}
        batch, seqlen, seqlen_decoder = 2, 75, 33
        name, where = "T5 small size", "2 + 2 layers, 4 heads of 32"
    else:
        options = {"vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 3072}
        options |= {"num_layers": 12, "num_heads": 12}
        batch, seqlen, seqlen_decoder = 16, 512, 128
        name, where = "T5 base", "t5-base: 12 + 12 layers, 12 heads of 64"
    vocabulary = options["vocab_size"]
    tokens = token_batch((seqlen,) * batch, Padding.NONE, vocabulary=vocabulary)
    decoded = token_batch((seqlen_decoder,) * batch, Padding.NONE, vocabulary=vocabulary, seed=1)
    yield Case(
        family="t5",
        model=name,
        task=f"{batch} × {seqlen}, decoder {seqlen_decoder}",
        configuration=where,
        build=of_transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            device,
            attn_implementation="sdpa",
            decoder_start_token_id=PAD,
            **options,
        ),
        inputs=text_run(tokens | {"decoder_input_ids": decoded["input_ids"]}, "logits", use_cache=False),
    )
