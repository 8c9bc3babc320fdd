"""attn_implementation="sdpa_cutlass": the outputs of transformers' own attention, without dense masks."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sdpa_cutlass.errors import UnsupportedError
from tests.models import agreement, zoo
from tests.models.agreement import Agreement
from tests.models.generation import CACHES, clear_prompts, generate
from tests.models.zoo import Padding, Size

masking_utils = pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")
hook = pytest.importorskip("sdpa_cutlass.integrations.transformers", exc_type=UnsupportedError)

LAYERS = 2
WINDOW = 24
LENGTHS = (75, 66, 9)
Run = Callable[[Any], torch.Tensor]

GROUPED = Size(head_dim=64, num_heads_q=4, num_heads_kv=2)
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: zoo.llama(GROUPED),
    "llama_d40": lambda: zoo.llama(Size(head_dim=40, num_heads_q=4)),
    "gpt2": lambda: zoo.gpt2(Size(head_dim=64)),
    "mistral": lambda: zoo.mistral(GROUPED, window=WINDOW),
    "gpt_oss": lambda: zoo.gpt_oss(GROUPED, window=WINDOW),
}
has_gpt_oss = pytest.mark.skipif(
    importlib.util.find_spec("transformers.models.gpt_oss") is None, reason="this transformers has no gpt-oss"
)
# What these tests call has other arguments in transformers 4.53, whose masks do not trace either.
is_old = "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters
not_old = pytest.mark.skipif(is_old, reason="this transformers is too old for it")
every_decoder = pytest.mark.parametrize(
    "name", ["llama", "llama_d40", "gpt2", "mistral", pytest.param("gpt_oss", marks=has_gpt_oss)]
)
every_padding = pytest.mark.parametrize("padding", Padding, ids=lambda padding: padding.value)


def own_name(model: Any) -> str:
    """What transformers computes `model` with by itself: gpt-oss has no sdpa attention."""
    return "sdpa" if model._supports_sdpa else "eager"


@pytest.fixture
def usage(device: str) -> Any:
    found = hook.register(devices=[device])
    found.served = 0
    found.fallbacks.clear()
    return found


@contextlib.contextmanager
def no_dense_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where transformers makes a mask of more than one row."""
    make = masking_utils.sdpa_mask

    def spy(*args: Any, **options: Any) -> Any:
        mask = make(*args, **options)
        assert mask is None or mask.shape[2] == 1, f"a dense mask {tuple(mask.shape)}"
        return mask

    with monkeypatch.context() as patch:
        patch.setattr(masking_utils, "sdpa_mask", spy)
        yield


def measure(
    model: Any, run: Run, usage: Any, monkeypatch: pytest.MonkeyPatch, *, device: str, dtype: torch.dtype
) -> Agreement:
    """Runs `model` in `dtype` by transformers' own attention and by the hook, and in float32."""
    rounded = copy.deepcopy(model).to(device, dtype)
    name = hook.NAME if model._supports_sdpa else hook.SECOND_NAME
    with torch.no_grad():
        exact = agreement.in_float32(rounded)
        zoo.set_attention(exact, "eager")
        reference = run(exact).double()
        zoo.set_attention(rounded, own_name(model))
        own = run(rounded)
        zoo.set_attention(rounded, name)
        with no_dense_masks(monkeypatch):
            ours = run(rounded)
    return Agreement(
        error=(ours.double() - reference).abs().max().item(),
        torch_error=(own.double() - reference).abs().max().item(),
        magnitude=reference.abs().max().item(),
        dtype=dtype,
        served=usage.served,
        fallbacks=dict(usage.fallbacks),
    )


def logits_of(batch: dict[str, torch.Tensor], device: str) -> Run:
    """The logits of every token that is not padding, [tokens, vocabulary]."""
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    kept = on_device.get("attention_mask", torch.ones_like(on_device["input_ids"])).bool()

    def run(model: Any) -> torch.Tensor:
        logits: torch.Tensor = model(**on_device, use_cache=False).logits
        assert logits.isfinite().all()  # of padding, too
        return logits[kept]

    return run


@every_decoder
@every_padding
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_decoders_agree_without_dense_masks(
    name: str, padding: Padding, dtype: torch.dtype, device: str, usage: Any, monkeypatch: Any
) -> None:
    if name == "gpt_oss" and dtype is torch.bfloat16:
        pytest.skip("rounding to bfloat16 chooses other experts, with transformers' own attention too")
    run = logits_of(zoo.token_batch(LENGTHS, padding), device)
    found = measure(MODELS[name](), run, usage, monkeypatch, device=device, dtype=dtype)
    agreement.check(found, calls=LAYERS)


@pytest.mark.parametrize("head_dim", [64, 72])
def test_vision_transformers_agree(head_dim: int, device: str, usage: Any, monkeypatch: Any) -> None:
    pixels = zoo.images(3).to(device)

    def run(model: Any) -> torch.Tensor:
        return model(pixels.to(model.dtype)).logits  # type: ignore[no-any-return]

    model = zoo.vit(Size(head_dim=head_dim))
    found = measure(model, run, usage, monkeypatch, device=device, dtype=torch.float16)
    agreement.check(found, calls=LAYERS)


@every_decoder
@pytest.mark.parametrize("padding", [Padding.NONE, Padding.LEFT], ids=lambda padding: padding.value)
@pytest.mark.parametrize("cache", CACHES)
def test_generation_agrees(
    name: str, padding: Padding, cache: str, device: str, usage: Any, monkeypatch: Any
) -> None:
    """With a cache that grows and with one of full length; the window is passed by both."""
    model = MODELS[name]().to(device, torch.float16)
    zoo.set_attention(model, "eager")  # prompts are chosen by it
    batch = clear_prompts(model, (WINDOW + 3, 13, 2), padding, new_tokens=5, margin=0.02)
    tokens: list[torch.Tensor] = []

    def run(model: Any) -> torch.Tensor:
        chosen, logits = generate(model, batch, new_tokens=5, cache=cache)
        tokens.append(chosen)
        return logits

    found = measure(model, run, usage, monkeypatch, device=device, dtype=torch.float16)
    agreement.check(found, calls=5 * LAYERS)
    assert all(torch.equal(chosen, tokens[0]) for chosen in tokens)


@not_old
@pytest.mark.parametrize("cache", CACHES)
def test_a_prompt_in_pieces_agrees(cache: str, device: str, usage: Any, monkeypatch: Any) -> None:
    """Rows behind a cache that holds keys already: neither the first row nor a single one."""
    from transformers import DynamicCache, StaticCache

    batch = zoo.token_batch((50, 40), Padding.LEFT)
    ids, kept = (batch[name].to(device) for name in ("input_ids", "attention_mask"))

    def run(model: Any) -> torch.Tensor:
        is_new = "cache" in inspect.signature(model.forward).parameters  # from transformers 5.24 on
        past = (
            StaticCache(config=model.config, max_cache_len=70)
            if cache == "static"
            else DynamicCache(config=model.config)
        )
        logits = []
        for rows in (slice(0, 20), slice(20, 33), slice(33, 50)):
            seen = kept[:, : rows.stop]
            positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, rows]
            held = {"cache" if is_new else "past_key_values": past}
            found = model(ids[:, rows], attention_mask=seen, position_ids=positions, **held)
            logits.append(found.logits)
        return torch.cat(logits, 1)[kept.bool()]

    found = measure(MODELS["llama"](), run, usage, monkeypatch, device=device, dtype=torch.float16)
    agreement.check(found, calls=3 * LAYERS)


def test_what_is_not_served_is_counted_and_left_to_transformers(device: str, usage: Any) -> None:
    model = zoo.llama(GROUPED).to(device)
    batch = {name: value.to(device) for name, value in zoo.token_batch(LENGTHS, Padding.LEFT).items()}
    expected = model(**batch).logits
    zoo.set_attention(model, hook.NAME)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, expected, atol=1e-4, rtol=1e-4)
    assert dict(usage.fallbacks) == {"dtype torch.float32": LAYERS}
    model.half()(**batch).logits.sum().backward()
    assert dict(usage.fallbacks) == {"dtype torch.float32": LAYERS}
    assert usage.served == LAYERS


@has_gpt_oss
@pytest.mark.parametrize("padding", [Padding.NONE, Padding.LEFT], ids=lambda padding: padding.value)
def test_sinks_that_are_not_served_are_not_forgotten(padding: Padding, device: str, usage: Any) -> None:
    """transformers' sdpa attention would ignore them: the model's eager one computes the call."""
    model = zoo.gpt_oss(GROUPED, window=WINDOW).to(device)
    batch = {name: value.to(device) for name, value in zoo.token_batch(LENGTHS, padding).items()}
    kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    with torch.no_grad():
        expected = model(**batch).logits[kept]
        zoo.set_attention(model, hook.SECOND_NAME)
        torch.testing.assert_close(model(**batch).logits[kept], expected, atol=1e-4, rtol=1e-4)
    assert sum(usage.fallbacks.values()) == LAYERS


def test_sinks_without_an_attention_that_takes_them_are_refused(device: str, usage: Any) -> None:
    q = torch.randn(1, 2, 5, 64, device=device)  # float32
    with pytest.raises(UnsupportedError, match="s_aux of Linear"):
        hook.attention_forward(torch.nn.Linear(1, 1), q, q, q, None, s_aux=torch.zeros(2, device=device))


def test_masks_may_have_more_columns_than_keys(device: str, usage: Any) -> None:
    """As transformers' own attention takes them: what GPT-2 made in its release 4.53."""
    q = torch.randn(1, 2, 5, 64, device=device, dtype=torch.float16)
    mask = torch.rand(1, 1, 5, 8, device=device) < 0.7
    mask[..., 0] = True
    out, _ = hook.attention_forward(torch.nn.Linear(1, 1), q, q, q, mask)
    expected, _ = hook.attention_forward(torch.nn.Linear(1, 1), q, q, q, mask[..., :5].contiguous())
    assert torch.equal(out, expected)
    assert (usage.served, usage.fallbacks) == (2, {})


def test_the_first_fallback_of_a_reason_is_told(device: str, caplog: pytest.LogCaptureFixture) -> None:
    usage = hook.register(devices=[device], log_fallbacks=True)
    usage.fallbacks.clear()
    q = torch.randn(1, 2, 5, 64, device=device)
    with caplog.at_level("WARNING", logger="sdpa_cutlass"):
        for _ in range(2):
            hook.attention_forward(torch.nn.Linear(1, 1), q, q, q, None)
    assert [record.getMessage() for record in caplog.records] == [
        "attention left to transformers (told once): dtype torch.float32"
    ]


@not_old
def test_a_compiled_model_agrees(device: str, usage: Any) -> None:
    """torch.compile without a graph break: the operators stand in the graph."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    model = zoo.llama(GROUPED).to(device, torch.float16)
    run = logits_of(zoo.token_batch(LENGTHS, Padding.LEFT), device)
    torch._dynamo.reset()
    with torch.no_grad():
        zoo.set_attention(model, hook.NAME)
        expected = run(model)
        found = run(torch.compile(model, fullgraph=True, backend=backend))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=0)
    assert graphs[-1].count("torch.ops.sdpa_cutlass.") == LAYERS
    torch._dynamo.reset()


@has_gpt_oss
def test_sinks_get_gradients(device: str, usage: Any) -> None:
    """As the eager attention of the model's file gives them, in float32."""
    model = zoo.gpt_oss(GROUPED, window=WINDOW).to(device)
    batch = {name: value.to(device) for name, value in zoo.token_batch(LENGTHS, Padding.NONE).items()}
    grads = []
    for attention, dtype in (("eager", torch.float32), (hook.SECOND_NAME, torch.float16)):
        zoo.set_attention(model, attention)
        model.zero_grad()
        model.to(dtype)(**batch).logits.float().square().mean().backward()
        grads.append(torch.stack([layer.self_attn.sinks.grad.float() for layer in model.model.layers]))
    assert (usage.served, usage.fallbacks) == (LAYERS, {})
    torch.testing.assert_close(*grads, atol=0.02 * grads[0].abs().max().item(), rtol=0.02)
