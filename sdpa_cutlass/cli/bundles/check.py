"""The command `verify`: a bundle's problem run again here; what agrees, what differs, by how much.

Some differences break a claim, and `verify` fails for them; all others are shown. The claims are
    numerics   here, too, every error is within its bound (accuracy.py)
    file       the bundle's own parts fit together: rows, kernel, raw times and their medians
    kernel     the same library, by digest, chooses the same kernel on the same model of device
    outputs    that kernel gives the same bits for the same inputs there
    time       on the same model of GPU and with the same library, the time differs by no more than the noise
               of runs (changes.py)
Times of different devices, and any on a CPU, are not compared. A bundle is confirmed when each claim was
repeated; where one was not, the last lines say which, why, and what it would take.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdpa_cutlass.cli import FAILED, OK, CommandError, changes, results, running, timing
from sdpa_cutlass.cli.bundles import archive, measuring, record
from sdpa_cutlass.cli.bundles.measuring import OURS, Measured, is_of
from sdpa_cutlass.cli.bundles.record import Record
from sdpa_cutlass.cli.changes import Verdict
from sdpa_cutlass.cli.results import Results, Row
from sdpa_cutlass.cli.suites import Case

if TYPE_CHECKING:
    import torch

ENVIRONMENT = ("package", "gpu", "cpu", "driver", "cuda", "torch", "python")
ROUNDING = 1e-3  # of a median: a row's times have five digits


class Answer(enum.Enum):
    """What became of one comparison."""

    AGREES = "agrees"
    DIFFERS = "differs"
    BROKEN = "BROKEN"  # differs, and must not
    NOT_COMPARED = "not compared"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison: what the bundle says, what was found here, and a word on the difference."""

    what: str
    there: str
    here: str
    answer: Answer
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A bundle that was read: its parts fit together in form, not yet in what they say."""

    results: Results
    record: Record
    unit: bytes
    case: Case

    @property
    def ours(self) -> Row:
        """The row that the bundle is about."""
        return next(row for row in self.results.rows if row.provider == OURS)

    @property
    def machine(self) -> Mapping[str, Any]:
        """The environment that it was measured in."""
        return self.results.env


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status. Raises CommandError for what the user can put right."""
    running.require(["torch", "safetensors"])
    bundle = load(options.bundle)
    device = _device(bundle, options.device)
    seen = measuring.measure(
        bundle.case,
        [OURS],
        dtype=bundle.record.dtype,
        device=device,
        seed=bundle.record.seed,
        repeats=options.repeats or bundle.record.repeats or timing.REPEATS[device.type],
    )
    findings = [*check_file(bundle), *compare_with(bundle, seen, device.type)]
    is_confirmed = all(finding.answer is not Answer.BROKEN for finding in findings)
    if options.json:
        print(json.dumps(_plain(findings, is_confirmed), indent=1))
    else:
        print(to_text(bundle, findings, is_confirmed=is_confirmed, by=f"{seen.kernel} on {_place(device)}"))
    return OK if is_confirmed else FAILED


def _place(device: torch.device) -> str:
    return "this GPU" if device.type == "cuda" else "the host library, which runs kernels on the CPU"


def load(path: Any) -> Bundle:
    """Reads a bundle. Raises CommandError, with what is wrong, for any other file."""
    try:
        files = archive.read(path)
        found = results.from_json(files["result.json"].decode(), origin=f"{path}: result.json")
        about = record.from_json(files["bundle.json"], str(path))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}") from error
    except (archive.BundleError, results.ResultFormatError, UnicodeDecodeError) as error:
        raise CommandError(str(error)) from error
    case = measuring.find_case(about.problem)
    if not any(row.provider == OURS and is_of(row, case, about.dtype) for row in found.rows):
        raise CommandError(f"{path}: result.json has no row of {OURS} for {about.problem} in {about.dtype}")
    if not all(is_of(row, case, about.dtype) for row in found.rows):
        raise CommandError(f"{path}: result.json has rows of other problems than {about.problem}")
    return Bundle(found, about, files["unit.cu"], case)


def _device(bundle: Bundle, wanted: str) -> torch.device:
    """Where to run: as the bundle did, where that is possible and nothing else was said."""
    import torch

    if wanted == "auto":
        wanted = bundle.record.device if torch.cuda.is_available() else "cpu"
    return running.pick_device(wanted)


def check_file(bundle: Bundle) -> list[Finding]:
    """Whether the bundle's own parts say the same."""
    row, about = bundle.ours, bundle.record
    findings = [
        _claim("file: kernel", about.kernel, str(row.kernel), about.kernel == row.kernel),
        _claim("file: status", "ok", row.status, row.ok),
    ]
    if row.max_err_out is not None and row.bound_out is not None:
        within = row.max_err_out <= row.bound_out
        bound, error = f"<= {row.bound_out:.3g}", f"{row.max_err_out:.3g}"
        findings.append(_claim("file: error of O", bound, error, within))
    for other in bundle.results.rows:
        samples = about.samples_us.get(other.provider)
        if samples and other.time_us is not None:
            median = statistics.median(samples)
            fits = abs(median - other.time_us) <= ROUNDING * other.time_us + ROUNDING
            what = f"file: median of {other.provider}"
            findings.append(_claim(what, f"{other.time_us:.5g} us", f"{median:.5g} us", fits))
    if bundle.unit:
        holds = about.kernel.encode() in bundle.unit
        where = about.kernel if holds else "not in unit.cu"
        findings.append(_claim("file: unit", about.kernel, where, holds))
    return findings


def compare_with(bundle: Bundle, seen: Measured, device: str) -> list[Finding]:
    """The bundle against what was measured here on a device of type `device`."""
    there, here = bundle.machine, seen.results.env
    findings = [_fact(name, there.get(name), here.get(name)) for name in ENVIRONMENT]
    findings = [finding for finding in findings if finding.answer is not Answer.AGREES]
    built = [(env.get("library") or {}).get("digest") for env in (there, here)]
    same_library = built[0] is not None and built[0] == built[1]
    findings.append(_fact("library, by its sources", built[0], built[1]))
    if bundle.record.library is not None:
        findings.append(_fact("library, by its file", bundle.record.library, seen.library))
    same_type = bundle.record.device == device
    name = "gpu" if device == "cuda" else "cpu"
    same_model = same_type and there.get(name) == here.get(name)
    is_repeat = same_library and same_model
    findings.append(_expected("kernel", bundle.record.kernel, seen.kernel, must=is_repeat))
    findings.append(_unit(bundle, built[1], must=same_library))
    findings += _bits(bundle, seen, same_type=same_type, must=is_repeat)
    row = next(one for one in seen.results.rows if one.provider == OURS)
    findings.append(_numerics(bundle.ours, row))
    findings.append(_time(bundle, seen, must=is_repeat, same_model=same_model))
    return findings


def _unit(bundle: Bundle, built: str | None, *, must: bool) -> Finding:
    """The text of the kernel's unit, where both have it."""
    unit = measuring.unit_of(bundle.record.kernel, built)
    if not bundle.unit or not unit.text:
        reason = bundle.record.no_unit if not bundle.unit else unit.reason
        return Finding("unit of that kernel", "", "", Answer.NOT_COMPARED, reason or "")
    there, here = archive.digest(bundle.unit), archive.digest(unit.text)
    return _expected("unit of that kernel", there, here, must=must)


def _bits(bundle: Bundle, seen: Measured, *, same_type: bool, must: bool) -> list[Finding]:
    """Inputs and outputs by their digests."""
    about = bundle.record
    if about.inputs is None or about.outputs is None:
        note = "the bundle was made from a result file, which keeps no digests of tensors"
        return [Finding("inputs and outputs, by digest", "", "", Answer.NOT_COMPARED, note)]
    if not same_type:
        note = "CPU and GPU draw different inputs from one seed"
        return [Finding("inputs and outputs, by digest", "", "", Answer.NOT_COMPARED, note)]
    findings = [_fact(name, about.inputs.get(name), digest) for name, digest in seen.inputs.items()]
    same_inputs = about.inputs == seen.inputs
    for name, digest in seen.outputs.items():
        if same_inputs:
            findings.append(_expected(name, str(about.outputs.get(name)), digest, must=must))
        else:
            findings.append(Finding(name, "", "", Answer.NOT_COMPARED, "the inputs are other ones"))
    return findings


def _numerics(there: Row, here: Row) -> Finding:
    """The error against the reference; measure() has refused a row that breaks a bound."""
    if here.max_err_out is None or here.bound_out is None:
        return Finding("error of O", "", "", Answer.NOT_COMPARED, "nothing was checked")
    answer = Answer.AGREES if here.ok and here.max_err_out <= here.bound_out else Answer.BROKEN
    note = f"bound {here.bound_out:.3g}"
    if there.max_err_out:
        note += f", {here.max_err_out / there.max_err_out:.3g} times the bundle's"
    before = "-" if there.max_err_out is None else f"{there.max_err_out:.3g}"
    return Finding("error of O", before, f"{here.max_err_out:.3g}", answer, note)


def _time(bundle: Bundle, seen: Measured, *, must: bool, same_model: bool) -> Finding:
    """GPU times of the same model of GPU, with the noise of runs respected."""
    before = bundle.ours
    after = next(row for row in seen.results.rows if row.provider == OURS)
    if before.gpu_us is None or after.gpu_us is None:
        note = "times on a CPU mean nothing" if before.gpu_us is None else "no GPU was used here"
        return Finding("time", _us(before.gpu_us), _us(after.gpu_us), Answer.NOT_COMPARED, note)
    ratio = f"{after.gpu_us / before.gpu_us:.3f} times the bundle's"
    if not same_model:
        note = f"{ratio}; another model of GPU"
        return Finding("time", _us(before.gpu_us), _us(after.gpu_us), Answer.NOT_COMPARED, note)
    (change,) = changes.find(Results({}, [before]), Results({}, [after])).rows
    answer = Answer.AGREES if change.verdict is Verdict.SAME else Answer.BROKEN if must else Answer.DIFFERS
    note = f"{ratio}; {change.noise_us:.3g} us are noise"
    return Finding("time", _us(before.gpu_us), _us(after.gpu_us), answer, note)


def _us(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4g} us"


def _claim(what: str, there: str, here: str, holds: bool) -> Finding:
    return Finding(what, there, here, Answer.AGREES if holds else Answer.BROKEN)


def _fact(what: str, there: Any, here: Any) -> Finding:
    """Something that may differ."""
    return Finding(what, str(there), str(here), Answer.AGREES if there == here else Answer.DIFFERS)


def _expected(what: str, there: str, here: str, *, must: bool) -> Finding:
    """Something that has to be the same if `must`."""
    if there == here:
        return Finding(what, there, here, Answer.AGREES)
    return Finding(what, there, here, Answer.BROKEN if must else Answer.DIFFERS)


def not_repeated(bundle: Bundle, findings: list[Finding]) -> dict[str, str]:
    """The claims that this run says nothing about, each with the reason."""
    claims = {"kernel": ("kernel",), "outputs": ("inputs and outputs, by digest", "out", "lse")}
    if bundle.record.device == "cuda":
        claims["time"] = ("time",)
    missing = {}
    for claim, names in claims.items():
        found = [one for one in findings if one.what in names and one.answer is not Answer.AGREES]
        if found and all(one.answer is not Answer.BROKEN for one in found):
            missing[claim] = found[0].note or "another library or device"
    return missing


def _plain(findings: list[Finding], is_confirmed: bool) -> dict[str, Any]:
    """The findings as plain values."""
    rows = [dataclasses.asdict(finding) | {"answer": finding.answer.value} for finding in findings]
    return {"confirmed": is_confirmed, "findings": rows}


def to_text(bundle: Bundle, findings: list[Finding], *, is_confirmed: bool, by: str) -> str:
    """The findings for people: one line each, then what they amount to. `by`: what ran here, and where."""
    about = bundle.record
    lines = [f"{about.problem}, {about.dtype}, seed {about.seed}: {about.kernel}"]
    for finding in findings:
        values = _short(finding.here)
        if finding.there != finding.here:
            values = f"{_short(finding.there)} → {values}"
        if finding.answer is Answer.NOT_COMPARED and not finding.there:
            values = ""
        text = ", ".join(part for part in (values, finding.note) if part)
        lines.append(f"  {finding.answer.value:12} {finding.what}: {text}")
    lines.append(f"run here: {by}")
    missing = not_repeated(bundle, findings)
    if is_confirmed and missing:
        lines += [f"not repeated here: {claim}: {reason}" for claim, reason in missing.items()]
        machine = bundle.machine.get("gpu") or bundle.machine.get("cpu") or "that machine"
        digest = (bundle.machine.get("library") or {}).get("digest")
        lines.append(f"to repeat all of it: library {_short(str(digest))} on {machine}")
    verdict = "NOT confirmed" if not is_confirmed else "not contradicted" if missing else "confirmed"
    counts = [(answer, sum(finding.answer is answer for finding in findings)) for answer in Answer]
    lines.append(f"bundle {verdict}: " + ", ".join(f"{count} {answer.value}" for answer, count in counts))
    return "\n".join(lines)


def _short(text: str) -> str:
    """A digest's first digits, other text as it is."""
    return text[:16] if len(text) == 64 and all(one in "0123456789abcdef" for one in text) else text
