"""Llama, GPT-2 and ViT give the same logits with this library as with torch; padded batches included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import sdpa_cutlass
from tests.models import agreement, zoo
from tests.models.zoo import Padding, Size

DECODERS = {
    "llama_d64": lambda: zoo.llama(Size(head_dim=64, num_heads_q=4)),
    "llama_d40": lambda: zoo.llama(Size(head_dim=40, num_heads_q=4)),
    "gpt2_d64": lambda: zoo.gpt2(Size(head_dim=64)),
    "gpt2_d36": lambda: zoo.gpt2(Size(head_dim=36)),  # no multiple of 8: padded by copies
}
LAYERS = 2
LENGTHS = (75, 66, 9)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
every_decoder = pytest.mark.parametrize("name", DECODERS)

Run = Callable[[torch.nn.Module], torch.Tensor]


def logits_of(batch: dict[str, torch.Tensor], device: str) -> Run:
    """The logits of every token that is not padding, [tokens, vocabulary]."""
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    kept = on_device.get("attention_mask", torch.ones_like(on_device["input_ids"])).bool()

    def run(model: torch.nn.Module) -> torch.Tensor:
        logits = model(**on_device, use_cache=False).logits
        assert logits.isfinite().all()  # of padding, too
        return logits[kept]

    return run


@every_decoder
@pytest.mark.parametrize("padding", Padding, ids=lambda padding: padding.value)
@both_dtypes
def test_decoders_agree(name: str, padding: Padding, dtype: torch.dtype, device: str) -> None:
    run = logits_of(zoo.token_batch(LENGTHS, padding), device)
    found = agreement.measure(DECODERS[name](), run, dtype=dtype, device=device)
    agreement.check(found, calls=LAYERS)


@pytest.mark.parametrize("head_dim", [64, 72])
@both_dtypes
def test_vision_transformers_agree(head_dim: int, dtype: torch.dtype, device: str) -> None:
    pixels = zoo.images(3).to(device)
    model = zoo.vit(Size(head_dim=head_dim))
    found = agreement.measure(
        model, lambda model: model(pixels.to(model.dtype)).logits, dtype=dtype, device=device
    )
    agreement.check(found, calls=LAYERS)


@every_decoder
def test_sequences_of_a_batch_are_independent(name: str, device: str) -> None:
    """Each sequence of a padded batch gives what it gives alone, whatever stands in the padding."""
    model = DECODERS[name]().to(device, torch.float16)
    batch = zoo.token_batch(LENGTHS, Padding.RIGHT)
    other = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)}
    with torch.no_grad(), sdpa_cutlass.enabled(devices=[device]) as usage:
        together = logits_of(batch, device)(model)
        assert torch.equal(logits_of(other, device)(model), together)
        alone = [
            logits_of({"input_ids": ids[None, :length]}, device)(model)
            for ids, length in zip(batch["input_ids"], LENGTHS, strict=True)
        ]
    assert (usage.served, usage.fallbacks) == ((2 + len(LENGTHS)) * LAYERS, {})
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-2, rtol=0)


def test_a_compiled_model_agrees(device: str) -> None:
    """torch.compile without a graph break: the operators stand in the graph."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    def run(model: torch.nn.Module) -> torch.Tensor:
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        return logits_of(zoo.token_batch(LENGTHS, Padding.LEFT), device)(compiled)

    torch._dynamo.reset()
    found = agreement.measure(DECODERS["llama_d64"](), run, dtype=torch.float16, device=device)
    assert found.holds, found
    assert graphs[-1].count("torch.ops.sdpa_cutlass.") == LAYERS
    torch._dynamo.reset()


def test_attention_dropout(device: str) -> None:
    """A GPT-2 in training mode without gradients: dropout is served, and is a matter of torch's seed."""
    model = DECODERS["gpt2_d64"]().to(device, torch.float16)
    run = logits_of(zoo.token_batch(LENGTHS, Padding.RIGHT), device)

    def with_seed(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return run(model)

    with torch.no_grad(), sdpa_cutlass.enabled(devices=[device]) as usage:
        expected = run(model)
        model.train()
        drawn = with_seed(0)
        assert torch.equal(with_seed(0), drawn)
        others = [with_seed(seed) for seed in range(1, 5)]
        assert all(not torch.equal(other, drawn) for other in others)
    assert (usage.served, usage.fallbacks) == (7 * LAYERS, {})
    mean = torch.stack([drawn, *others]).float().mean(0)
    assert (mean - expected).abs().mean() < (drawn - expected).abs().mean()
