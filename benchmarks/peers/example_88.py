"""CUTLASS's example 88, attention for Hopper, next to this library's kernels.

    python -m benchmarks.peers.example_88 --json FILE
    python -m benchmarks.peers.example_88 --filter '*_d128*' --program build/peers/88_hopper_fmha

The example is compiled from the nvidia-cutlass package with nvcc of a whole CUDA toolkit (it needs cuRAND's
headers), which takes minutes; nothing of it is shipped. It runs at problems of the suite `hopper` that it
has kernels for: head_dim 64, 128 and 256, as many key heads as query heads, float16. Both take turns, problem
by problem. The example's time is its own: the mean of `--iterations` launches, of the fastest kernel that it
tries. Ours is that of `bench`, the median of graph replays. Exit status 1 when the example finds a result of
its own wrong (with --verify), 2 without a GPU, nvcc or the package.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sdpa_cutlass.cli import environment, measure, providers, roofline, suites
from sdpa_cutlass.cli.results import write_atomically
from sdpa_cutlass.cli.suites import Case

FORMAT = 1
PROGRAM = Path("build/peers/88_hopper_fmha")
HEAD_DIMS = (64, 128, 256)
ITERATIONS = 50
_RESULT = re.compile(r"\[(OK|--|FAIL)\s*\]\s+(.+?)\s+: \S+ TFLOPS/s\s+t=(\S+)ms")
_FLAGS = ("-std=c++17", "-O3", "-arch=sm_90a", "--use_fast_math", "--expt-relaxed-constexpr", "-DNDEBUG")


class PeerError(RuntimeError):
    """The example cannot be built or run; the message says why."""


def build(program: Path) -> None:
    """Compiles the example to `program`. Raises PeerError."""
    spec = find_spec("cutlass_library")
    source = Path(spec.origin).parent / "source" if spec is not None and spec.origin else None
    if source is None or not (source / "examples" / "88_hopper_fmha").is_dir():
        raise PeerError("the package nvidia-cutlass, which has the example, is not installed")
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise PeerError("no nvcc on PATH or in /usr/local/cuda/bin")
    program.parent.mkdir(parents=True, exist_ok=True)
    example = source / "examples" / "88_hopper_fmha"
    folders = (
        source / "include",
        source / "tools" / "util" / "include",
        source / "examples" / "common",
        example,
    )
    command = [nvcc, *_FLAGS, *(f"-I{folder}" for folder in folders), "-o", str(program), "-lcuda"]
    done = subprocess.run(
        [*command, str(example / "88_hopper_fmha.cu")], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PeerError(f"nvcc failed: {done.stderr.strip()[-2000:]}")


def cases(globs: Sequence[str]) -> list[Case]:
    """What both can run, of names that match any of `globs`; all without."""
    return [
        case
        for case in suites.SUITES["hopper"]()
        if case.head_dim in HEAD_DIMS
        and case.num_heads_q == case.num_heads_kv
        and (not globs or any(fnmatch.fnmatchcase(case.name, glob) for glob in globs))
    ]


def arguments_of(case: Case, iterations: int, *, verify: bool) -> list[str]:
    """The example's command line for a case."""
    sizes = {
        "b": case.batch,
        "h": case.num_heads_q,
        "q": case.seqlen_q,
        "k": case.seqlen_k,
        "d": case.head_dim,
    }
    options = [f"--{name}={size}" for name, size in sizes.items()]
    options += [f"--mask={'causal' if case.causal else 'no'}", f"--iterations={iterations}", "--verbose"]
    return options + ["--verify"] * verify


def kernels_of(output: str) -> dict[str, dict[str, Any]]:
    """What the example prints of each of its kernels: microseconds, and whether it found the result right.

    `is_right` is None where it was not asked to look. Raises PeerError where it names no kernel.
    """
    found = {
        name: {"us": 1000 * float(ms), "is_right": {"OK": True, "FAIL": False}.get(verdict)}
        for verdict, name, ms in _RESULT.findall(output)
    }
    if not found:
        raise PeerError(f"the example printed no time: {output.strip()[-500:]}")
    return found


def run(program: Path, case: Case, iterations: int, *, verify: bool) -> dict[str, dict[str, Any]]:
    """The example's kernels at a case. Raises PeerError."""
    command = [str(program.resolve()), *arguments_of(case, iterations, verify=verify)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return kernels_of(done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the head of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--filter", action="append", default=[], metavar="GLOB", help="names of problems")
    parser.add_argument("--program", type=Path, default=PROGRAM, help="built where it does not exist")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, metavar="N")
    parser.add_argument("--verify", action="store_true", help="the example compares with its reference: slow")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    device = torch.device("cuda", 0)
    env = environment.record(device)
    settings = measure.Settings(
        device=device,
        dtype="f16",
        providers=[providers.ALL["fused"]],
        seed=0,
        repeats=25,
        ceilings=roofline.ceilings_of(env),
    )
    rows, is_wrong = [], False
    try:
        if not given.program.exists():
            build(given.program)
        for case in cases(given.filter):
            ours = measure.measure(case, settings)[0]
            kernels = run(given.program, case, given.iterations, verify=given.verify)
            best = min(kernels, key=lambda name: kernels[name]["us"])
            is_wrong |= any(kernel["is_right"] is False for kernel in kernels.values())
            rows.append(
                {"problem": case.name, "kernel": ours.kernel, "us": ours.gpu_us, "status": ours.status}
                | {"example": kernels}
            )
            theirs = kernels[best]["us"]
            ratio = f"{theirs / ours.gpu_us:.2f}" if ours.gpu_us else ours.status
            print(
                f"{case.name:<34} {ours.gpu_us or 0:9.1f} us, the example {theirs:9.1f} us  {ratio}  {best}"
            )
    except PeerError as error:
        parser.error(str(error))
    if given.json:
        write_atomically(
            given.json, json.dumps({"format": FORMAT, "env": env, "rows": rows}, indent=1) + "\n"
        )
    return int(is_wrong)


if __name__ == "__main__":
    raise SystemExit(main())
