"""Whole models with sdpa_cutlass.enabled() against torch: logits, generation, embeddings, and their times.

    python -m benchmarks.models                                   # on the GPU, float16 and bfloat16
    python -m benchmarks.models --json benchmarks/results/models/CARD.json
    python -m benchmarks.models --device cpu --small              # a trial of the script: times mean nothing

Needs what tests/models needs (requirements/dev.lock, requirements/encoder.txt) and shares its models, inputs
and verdicts: Llama (grouped heads), GPT-2 and ViT with random weights, padded batches, greedy generation
with both kinds of KV cache, and a pretrained text encoder on real texts. `error` is the largest difference
from the model in float32, of torch and of this library; at most twice torch's is agreement, see
tests/models/agreement.py. Generated tokens must be the same. Times are wall-clock medians of a whole forward
pass or generation, in ms. Exits with 1 when anything disagrees or an attention call was not served.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch

import sdpa_cutlass
from sdpa_cutlass.cli import environment
from sdpa_cutlass.cli.results import write_atomically
from tests.models import agreement, encoder, zoo
from tests.models.generation import CACHES, clear_prompts, generate
from tests.models.zoo import Padding, Size

Run = Callable[[Any], torch.Tensor]
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
MARGIN = 0.1  # of generated tokens


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison, as the result file has it."""

    model: str
    task: str
    dtype: str
    torch_error: float
    error: float
    bound: float
    agrees: bool
    served: int
    fallbacks: dict[str, int]
    torch_ms: float
    ms: float


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is. `lengths` are those of a batch of token sequences."""

    llamas: tuple[Size, ...]
    gpt2s: tuple[Size, ...]
    vits: tuple[tuple[Size, int, int], ...]  # with image_size, patch_size
    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    new_tokens: int
    text_copies: int
    repeats: int


LARGE = Scale(
    llamas=(
        Size(head_dim=128, num_heads_q=16, num_heads_kv=4, layers=8),
        Size(head_dim=80, num_heads_q=16, num_heads_kv=4, layers=4),
        Size(head_dim=256, num_heads_q=8, num_heads_kv=1, layers=4),
    ),
    gpt2s=(
        Size(head_dim=64, num_heads_q=16, num_heads_kv=16, layers=12),
        Size(head_dim=36, num_heads_q=16, num_heads_kv=16, layers=4),
    ),
    vits=(
        (Size(head_dim=64, num_heads_q=12, num_heads_kv=12, layers=12), 224, 16),
        (Size(head_dim=72, num_heads_q=16, num_heads_kv=16, layers=8), 378, 14),
    ),
    lengths=(2048, 1500, 1025, 700, 333, 64, 17, 1),
    prompts=(700, 300, 5),
    new_tokens=8,
    text_copies=16,
    repeats=11,
)
SMALL = Scale(
    llamas=(Size(head_dim=40, num_heads_q=4, num_heads_kv=2),),
    gpt2s=(Size(head_dim=64),),
    vits=((Size(head_dim=72), 48, 8),),
    lengths=(75, 9),
    prompts=(21, 2),
    new_tokens=4,
    text_copies=1,
    repeats=1,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, prints a table, writes the file. Returns the exit status."""
    options = _parser().parse_args(arguments)
    scale = SMALL if options.small else LARGE
    device = torch.device(options.device)
    env = environment.record(device) | {"transformers": environment.package_version("transformers")}
    rows = []
    with torch.no_grad():
        for row in _rows(scale, options):
            rows.append(row)
            print(_line(row), flush=True)
    environment.close(env, device)
    wrong = [row for row in rows if not row.agrees]
    print(f"{len(rows) - len(wrong)} of {len(rows)} agree")
    print(", ".join(f"{key} {env[key]}" for key in ("gpu", "driver", "torch", "transformers", "date")))
    if options.json is not None:
        found = {"env": env, "rows": [dataclasses.asdict(row) for row in rows]}
        write_atomically(options.json, json.dumps(found, indent=1) + "\n")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="models that a CPU can run")
    parser.add_argument("--dtype", choices=(*DTYPES, "both"), default="both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument(
        "--encoder",
        metavar="FOLDER",
        help="of the text encoder; 'none' leaves it out; default: the package's",
    )
    return parser


def _rows(scale: Scale, options: argparse.Namespace) -> Iterator[Row]:
    device = options.device
    folder = _encoder_folder(options.encoder)
    print(f"{'model':24}{'task':28}{'dtype':6}{'torch error':>12}{'error':>10}{'bound':>10}"
          f"{'served':>8}{'torch ms':>10}{'ms':>9}")  # fmt: skip
    for name in DTYPES if options.dtype == "both" else (options.dtype,):
        subject = _Comparison(name, device, scale.repeats)
        for size in scale.llamas:
            yield from _decoder(subject, f"llama {size}", zoo.llama(size, max_length=4096), size, scale)
        for size in scale.gpt2s:
            yield from _decoder(subject, f"gpt2 {size}", zoo.gpt2(size, max_length=4096), size, scale)
        for size, image_size, patch_size in scale.vits:
            model = zoo.vit(size, image_size=image_size, patch_size=patch_size)
            pixels = zoo.images(4, image_size=image_size).to(device)
            task = f"{(image_size // patch_size) ** 2 + 1} patches"
            yield subject.row(
                f"vit {size}",
                task,
                model,
                lambda model, pixels=pixels: model(pixels.to(model.dtype)).logits,
                calls=size.layers,
            )
        if folder is not None:
            reader = encoder.Encoder(folder)
            run = reader.embedding(encoder.TEXTS * scale.text_copies, device)
            yield subject.row(
                "MiniLM-L6 d32 h12 l6", "embeddings, padded", reader.model, run, calls=encoder.LAYERS
            )


def _encoder_folder(asked: str | None) -> Path | None:
    if asked is not None:
        return None if asked == "none" else Path(asked)
    try:
        return encoder.default_folder()
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: install requirements/encoder.txt, or use --encoder FOLDER or --encoder none")


def _decoder(subject: _Comparison, name: str, model: Any, size: Size, scale: Scale) -> Iterator[Row]:
    """Logits of every kind of padding; in float16 also generation, whose tokens bfloat16 cannot decide."""
    device = subject.device
    for padding in Padding:
        batch = {key: value.to(device) for key, value in zoo.token_batch(scale.lengths, padding).items()}
        kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()

        def logits(model: Any, batch: dict[str, Any] = batch, kept: torch.Tensor = kept) -> torch.Tensor:
            return model(**batch, use_cache=False).logits[kept]

        task = f"logits, {padding.value} padding" if padding is not Padding.NONE else "logits"
        yield subject.row(name, task, model, logits, calls=size.layers)
    if subject.dtype is not torch.float16:
        return
    rounded = model.to(device, torch.float16)
    prompts = clear_prompts(rounded, scale.prompts, Padding.LEFT, new_tokens=scale.new_tokens, margin=MARGIN)
    for cache in CACHES:
        run = functools.partial(generate, batch=prompts, new_tokens=scale.new_tokens, cache=cache)
        yield subject.row(
            name,
            f"generation, {cache} cache",
            model,
            lambda model, run=run: run(model)[1],
            calls=size.layers * scale.new_tokens,
            tokens=lambda model, run=run: run(model)[0],
        )


class _Comparison:
    """Runs a task by torch and by this library in one dtype on one device."""

    def __init__(self, dtype: str, device: str, repeats: int) -> None:
        self.name = dtype
        self.dtype = DTYPES[dtype]
        self.device = device
        self._repeats = repeats

    def row(
        self,
        model_name: str,
        task: str,
        model: torch.nn.Module,
        run: Run,
        *,
        calls: int,
        tokens: Run | None = None,
    ) -> Row:
        """`calls` attention calls belong to `run`; `tokens`, if given, must come out the same."""
        found = agreement.measure(model, run, dtype=self.dtype, device=self.device)
        agrees = found.holds and found.served == calls and not found.fallbacks
        rounded = copy.deepcopy(model).to(self.device, self.dtype)
        torch_ms = self._milliseconds(rounded, run)
        by_torch = None if tokens is None else tokens(rounded)
        with sdpa_cutlass.enabled(devices=[self.device]):
            ms = self._milliseconds(rounded, run)
            if tokens is not None and by_torch is not None:
                agrees = agrees and torch.equal(tokens(rounded), by_torch)
        return Row(
            model=model_name,
            task=task,
            dtype=self.name,
            torch_error=found.torch_error,
            error=found.error,
            bound=found.bound,
            agrees=agrees,
            served=found.served,
            fallbacks=found.fallbacks,
            torch_ms=round(torch_ms, 3),
            ms=round(ms, 3),
        )

    def _milliseconds(self, model: torch.nn.Module, run: Run) -> float:
        times = []
        for _ in range(self._repeats):
            self._synchronize()
            start = time.perf_counter()
            run(model)
            self._synchronize()
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times)

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _line(row: Row) -> str:
    verdict = "" if row.agrees else f"  WRONG {row.fallbacks or ''}"
    return (
        f"{row.model:24}{row.task:28}{row.dtype:6}{row.torch_error:12.5f}{row.error:10.5f}{row.bound:10.5f}"
        f"{row.served:8}{row.torch_ms:10.2f}{row.ms:9.2f}{verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
