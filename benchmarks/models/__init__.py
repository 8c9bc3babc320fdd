"""Whole models under sdpa_cutlass against torch: outputs, what is served, times, attention's share of them.

    python -m benchmarks.models                                    # on the GPU, float16 and bfloat16
    python -m benchmarks.models --json benchmarks/results/models/CARD.json
    python -m benchmarks.models --family llama vit --mode eager    # some of them
    python -m benchmarks.models --precision int8 --json FILE       # 8-bit attention, end to end
    python -m benchmarks.models --device cpu --small               # errors and counts, no times

Needs what tests/models needs (requirements/dev.lock, requirements/encoder.txt). Weights are random, drawn so
that scores have the spread of trained models; sizes are those of public configurations (`configuration` in
the file says which, and what was cut). Nothing is downloaded. The text encoder alone has trained weights.

Each model runs by torch's default, by each single backend of torch that can serve it, under
`sdpa_cutlass.enabled()` and, if transformers has it, through transformers' attention interface; eager,
compiled and as a CUDA graph. `error` is the largest difference from the model in float32; at most twice
torch's is agreement, see tests/models/agreement.py. Times are wall-clock medians of a whole run in ms, taken
in turns in one process; on a CPU none are taken. Exits with 1 when anything disagrees, or when an attention
call was passed on.

case.py  inputs.py     one thing to measure, and what goes in
language.py  vision.py  diffusion.py  pretrained.py  families.py     the models
watch.py  providers.py  machine.py  share.py     the calls, who computes, how long, attention's share
measure.py  quantised.py  report.py  command.py     rows, 8-bit rows, the printed table, the command
page.py     the tables of docs/models.md and docs/quantised.md, from committed files
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from benchmarks.models.command import main

__all__ = ["main"]
