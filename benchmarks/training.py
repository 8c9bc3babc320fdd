"""A model trains under `enable()` and under torch's own attention: `python -m benchmarks.training`.

A small GPT-2 of transformers with random weights, dropout everywhere, gradient checkpointing and AdamW, in
float32 weights under autocast, learns a seeded Markov chain. Every run has the same weights and batches; runs
differ in who computes attention and in the seed of dropout. What is asked:

    served     every call of attention, again in the recomputation of each layer, went to the library
    repeated   a second run under `enable()` has the same losses and parameters, bit for bit
    noise      the root mean square of the differences of two loss curves. Those between the library's and
               torch's runs are on average at most 1.25 times the mean of those between torch's
    falls      the last losses are lower than the first

Milliseconds of a step are the median's, wall time; `--model gpt2` is large enough for them to mean something.

--device cpu runs on the host library: kernels, thread by thread, on the CPU. Prints a table; --json writes
all curves. Exits with 1 when something that is asked does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import sdpa_cutlass
from sdpa_cutlass.cli import environment
from sdpa_cutlass.cli.results import write_atomically

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
TORCH_SEEDS = (1, 2, 3)
MOST_NOISE = 1.25
TOKENS = 64  # of the vocabulary
MODELS: dict[str, dict[str, Any]] = {
    "small": {},
    "gpt2": {"batch": 8, "seqlen": 1024, "layers": 12, "heads": 12, "head_dim": 64, "learning_rate": 3e-4},
}
_ENDS = 10  # steps of which the first and the last losses are means


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Model, data and optimizer."""

    device: str
    dtype: str = "bf16"
    steps: int = 200
    batch: int = 4
    seqlen: int = 48
    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    dropout: float = 0.1
    learning_rate: float = 3e-3


@dataclasses.dataclass(frozen=True)
class Run:
    """A loss for each step, and the parameters after the last one as a hash."""

    attention: str
    seed: int
    losses: list[float]
    parameters: str
    served: int = 0
    fallbacks: dict[str, int] = dataclasses.field(default_factory=dict)
    step_ms: float = 0.0  # 0 in files of before steps were timed


def model(setup: Setup) -> torch.nn.Module:
    """The same weights in every run."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=setup.seqlen,
        n_embd=setup.heads * setup.head_dim,
        n_layer=setup.layers,
        n_head=setup.heads,
        attn_pdrop=setup.dropout,
        embd_pdrop=setup.dropout,
        resid_pdrop=setup.dropout,
        bos_token_id=0,
        eos_token_id=None,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    made: torch.nn.Module = GPT2LMHeadModel(config)
    kwargs = {"use_reentrant": False}
    if hasattr(made, "activation_checkpointing_enable"):  # transformers 5 names it so
        made.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    return made.to(setup.device).train()


def batches(setup: Setup) -> list[torch.Tensor]:
    """[batch, seqlen] a step: the next token is one of four that the last two decide."""
    draw = torch.Generator().manual_seed(0)
    followers = torch.randint(TOKENS, (TOKENS, TOKENS, 4), generator=draw)
    found = []
    for _ in range(setup.steps):
        tokens = torch.randint(TOKENS // 8, (setup.batch, setup.seqlen), generator=draw)
        choices = torch.randint(4, tokens.shape, generator=draw)
        for i in range(2, setup.seqlen):
            tokens[:, i] = followers[tokens[:, i - 2] % 4, tokens[:, i - 1], choices[:, i]]
        found.append(tokens.to(setup.device))
    return found


def train(setup: Setup, *, seed: int, is_ours: bool) -> Run:
    """One run. `seed` is dropout's."""
    trained = model(setup)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=setup.learning_rate)
    losses, times = [], []
    with sdpa_cutlass.enabled(devices=[setup.device]) if is_ours else contextlib.nullcontext() as usage:
        torch.manual_seed(seed)
        for tokens in batches(setup):
            start = time.perf_counter()
            optimizer.zero_grad()
            with torch.autocast(setup.device, dtype=DTYPES[setup.dtype]):
                loss = trained(tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            if tokens.is_cuda:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
    digest = hashlib.sha256()
    for parameter in trained.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    served, fallbacks = (usage.served, dict(usage.fallbacks)) if usage is not None else (0, {})
    return Run(
        "sdpa_cutlass" if is_ours else "torch",
        seed,
        losses,
        digest.hexdigest(),
        served,
        fallbacks,
        statistics.median(times),
    )


def runs(setup: Setup) -> list[Run]:
    """The library's, the same again, and torch's."""
    ours = [train(setup, seed=1, is_ours=True) for _ in range(2)]
    return ours + [train(setup, seed=seed, is_ours=False) for seed in TORCH_SEEDS]


def distance(one: Run, other: Run) -> float:
    """The root mean square of the differences of two curves."""
    return math.sqrt(statistics.fmean((a - b) ** 2 for a, b in zip(one.losses, other.losses, strict=True)))


def verdict(setup: Setup, found: list[Run]) -> tuple[dict[str, Any], list[str]]:
    """What `runs` shows in numbers, and what of it does not hold."""
    first, second, *torchs = found
    ends = [statistics.fmean(run.losses[-_ENDS:]) for run in found]
    pairs = itertools.combinations(torchs, 2)
    numbers: dict[str, Any] = {
        "first_losses": statistics.fmean(first.losses[:_ENDS]),
        "last_losses": {"sdpa_cutlass": ends[0], "torch": ends[2:]},
        "noise_between_torchs": statistics.fmean(itertools.starmap(distance, pairs)),
        "noise_to_torchs": statistics.fmean(distance(first, run) for run in torchs),
        "is_repeated": (first.losses, first.parameters) == (second.losses, second.parameters),
        "step_ms": {"sdpa_cutlass": first.step_ms, "torch": statistics.median(run.step_ms for run in torchs)},
    }
    calls = 2 * setup.steps * setup.layers  # forward, and again in the backward
    broken = [
        f"{run.served} of {calls} calls served, {run.fallbacks}"
        for run in (first, second)
        if run.served != calls or run.fallbacks
    ]
    if not numbers["is_repeated"]:
        broken.append("the repeated run has other bits")
    if not numbers["noise_to_torchs"] <= MOST_NOISE * numbers["noise_between_torchs"]:
        broken.append("the loss curve is further from torch's than torch's from each other")
    if not ends[0] < numbers["first_losses"]:
        broken.append("the loss does not fall")
    return numbers, broken


def main(arguments: list[str] | None = None) -> int:
    """Runs, prints, writes; 1 when something that is asked does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--model", choices=tuple(MODELS), default="small")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the curves")
    options = parser.parse_args(arguments)
    setup = Setup(device=options.device, dtype=options.dtype, steps=options.steps, **MODELS[options.model])
    device = torch.device(options.device)
    env = environment.record(device)
    env |= {"transformers": environment.package_version("transformers")}
    found = runs(setup)
    environment.close(env, device)
    numbers, broken = verdict(setup, found)
    for run in found:
        last = statistics.fmean(run.losses[-_ENDS:])
        print(f"{run.attention:13} seed {run.seed}  last losses {last:.4f}  {run.step_ms:.2f} ms a step")
    for name, value in numbers.items():
        print(f"{name}: {value}")
    print("\n".join(broken) or "all that is asked holds")
    if options.json is not None:
        record = {
            "env": env,
            "setup": dataclasses.asdict(setup),
            "numbers": numbers,
            "runs": [
                dataclasses.asdict(run) | {"losses": [round(loss, 5) for loss in run.losses]} for run in found
            ],
        }
        write_atomically(options.json, json.dumps(record) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
