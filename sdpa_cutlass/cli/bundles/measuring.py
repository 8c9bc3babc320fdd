"""One problem measured with everything that a bundle keeps: rows, raw times, digests, the kernel's unit.

The kernel runs once more on the first input set for the digests of q, k, v, O and LSE: the same kernel gives
the same bits for the same inputs. Random inputs follow from the seed and the problem's name, on CPU and GPU
differently, and torch promises them for one release only; so a bundle says what they were.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdpa_cutlass.cli import (
    CommandError,
    environment,
    peers,
    providers,
    results,
    roofline,
    running,
    timing,
)
from sdpa_cutlass.cli.results import Results, Row
from sdpa_cutlass.cli.suites import SUITE_NAMES, Case
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target

if TYPE_CHECKING:
    import torch

OURS = "fused"  # the provider that a bundle is about


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One problem, measured here; `samples_us`, `inputs`, `outputs` as in record.py."""

    results: Results
    kernel: str
    samples_us: dict[str, list[float]]
    inputs: dict[str, str]
    outputs: dict[str, str]
    library: str


@dataclasses.dataclass(frozen=True)
class Unit:
    """A generated unit and its text, or why there is none."""

    path: str | None
    text: bytes
    reason: str | None


def find_case(name: str) -> Case:
    """The problem of that name. Raises CommandError for a name that no suite has."""
    suite = name.partition("/")[0]
    if suite not in SUITE_NAMES:
        raise CommandError(f"the problem {name[:100]!r} is of none of the suites {', '.join(SUITE_NAMES)}")
    found = [case for case in running.find_cases([suite], []) if case.name == name]
    if not found:
        raise CommandError(f"suite {suite} has no problem {name[:100]!r}; `compare --list` shows their names")
    return found[0]


def is_of(row: Row, case: Case, dtype: str) -> bool:
    """Whether a row is of that problem and type."""
    values = {
        **{name: getattr(case, name) for name in results.PROBLEM_KEYS if hasattr(case, name)},
        "dtype": dtype,
        "alignment": case.alignment.value,
    }
    return all(getattr(row, name) == value for name, value in values.items())


def measure(
    case: Case, names: Sequence[str], *, dtype: str, device: torch.device, seed: int, repeats: int
) -> Measured:
    """Measures `case` with the providers `names`, ours among them.

    Raises CommandError when ours cannot run, or a peer is not installed.
    """
    import torch

    from sdpa_cutlass.cli import measure as measuring

    running.require_library([OURS], device)
    found, about = peers.find() if any(name not in providers.ALL for name in names) else ({}, {})
    every = providers.ALL | found
    for name in names:
        if name not in every:
            raise CommandError(f"--providers {name}: {about.get(name, 'not installed')}")
    torch.set_float32_matmul_precision("highest")
    env = environment.record(device)
    samples: dict[str, list[float]] = {}
    settings = measuring.Settings(
        device=device,
        dtype=dtype,
        providers=[every[name] for name in names],
        seed=seed,
        repeats=repeats,
        budget_s=timing.BUDGET_S,
        ceilings=roofline.ceilings_of(env) if device.type == "cuda" else None,
        keep=lambda name, timing: samples.update({name: [round(one, 3) for one in timing.samples_us]}),
    )
    rows = measuring.measure(case, settings)
    environment.close(env, device)
    ours = next(row for row in rows if row.provider == OURS)
    if not ours.ok or ours.kernel is None:
        raise CommandError(f"{case.name}: {OURS}: {ours.status}")
    operands = measuring.input_sets(case, settings)[0]
    out, lse = providers.with_lse(providers.ALL[OURS], case, operands)
    return Measured(
        results=Results(env, rows),
        kernel=ours.kernel,
        samples_us=samples,
        inputs={name: tensor_digest(one) for name, one in zip("qkv", operands.qkv, strict=True)},
        outputs={"out": tensor_digest(out), "lse": tensor_digest(lse)},
        library=library_digest(_target(device)),
    )


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the elements' bytes, in the order of a contiguous tensor."""
    import torch

    data = tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def library_digest(target: Target) -> str:
    """SHA-256 of the library's file."""
    return hashlib.sha256(library(target).path.read_bytes()).hexdigest()


def _target(device: torch.device) -> Target:
    return Target.CUDA if device.type == "cuda" else Target.HOST


def unit_of(kernel: str, built: str | None) -> Unit:
    """The generated unit of `kernel` in a library whose digest is `built` (`env["library"]["digest"]`).

    It is looked for next to the libraries of this checkout, among the generated files of a build, and taken
    only from a set of files that has this very digest.
    """
    folders: list[Path] = []
    for target in Target:
        try:
            build = library(target).path.parents[1]
        except Exception:  # not built, or refused: the other one may be there
            continue
        folders += sorted(build.glob("generated*"))
    for folder in dict.fromkeys(folders):
        manifest = _manifest(folder)
        if manifest.get("digest") != built:
            continue
        for row in manifest.get("kernels", ()):
            if row["name"] == kernel:
                return Unit(row["file"], (folder / row["file"]).read_bytes(), None)
    return Unit(None, b"", f"no generated files of the digest {str(built)[:16]} here")


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
