"""PyTorch's own test_transformers.py without the library, under enable() and through the swap point.

    python -m tests.torch_suite /path/to/pytorch                # or the file itself
    make torch-suite TORCH_SUITE=/path/to/pytorch

No test may fail only with the library, except those of explained.py. Of a test that does, both runs are made
once more, alone; what counts is the second outcome. The file has to be that of the installed torch's version,
and is not part of this repository. Where there is a GPU its tests run there; elsewhere those for the CPU, on
the host library, which is slow: calls of more than --max-work multiply-adds are torch's, and no test is left
out.

Writes files of lines for each mode next to the report, one for each of --jobs, and goes on behind them when
it is started again with the same --out, so that --limit may cut a run into several. Exit status: 0 when no
difference is left without a reason, 1 when one is or tests are still to run, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tests.torch_suite.explained import EXPLAINED
from tests.torch_suite.records import Difference, Mode, Records, differences, of_mode, read

ROOT = Path(__file__).parents[2]
NAME = "test_transformers.py"
_LARGEST_PYTEST_STATUS_OF_A_RUN = 1  # 0: all passed, 1: some failed; 5: none to run


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        suite = find_suite(options.suite, torch.__version__)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    has_swap_point = device == "cuda" and hasattr(torch.nn.attention, "register_flash_attention_impl")
    modes = [mode for mode in options.modes if mode is not Mode.SWAP or has_swap_point]
    options.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(suite, device, options)
    finished = all(runner.run(mode) for mode in dict.fromkeys([Mode.PLAIN, *modes]))
    found = runner.compare(modes)
    if found and finished:
        runner.again(found)
        found = runner.compare(modes)
    report = {
        "format": 1,
        "env": _environment(device),
        "options": {"k": options.k, "timeout": options.timeout, "max_work": options.max_work},
        "left_out": [] if has_swap_point else ["the swap point: it needs CUDA and torch 2.11"],
        "finished": finished,
        "modes": {mode.value: runner.records(mode).summary() for mode in (Mode.PLAIN, *modes)},
        "differences": [_as_json(difference) for difference in found],
    }
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _print(report)
    unexplained = [difference for difference in found if difference.reason is None]
    return 0 if finished and not unexplained else 1


def find_suite(given: Path, version: str) -> Path:
    """The file itself, or that of a source tree. Raises ValueError when it cannot run here."""
    path = given / "test" / NAME if given.is_dir() and (given / "test").is_dir() else given
    path = path / NAME if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} is no file; wanted is {NAME} of torch {version}, or a source tree of it")
    stated = given / "version.txt"
    if given.is_dir() and stated.is_file():
        found = stated.read_text(encoding="utf-8").strip()
        if found.split(".")[:2] != version.split(".")[:2]:
            raise ValueError(f"{given} is the source of torch {found}; installed is {version}")
    if "torch.testing" in path.read_text(encoding="utf-8") and importlib.util.find_spec("expecttest") is None:
        raise ValueError("torch.testing needs the package expecttest: pip install expecttest")
    return path.resolve()


class Runner:
    """Runs the suite in processes and reads what they wrote."""

    def __init__(self, suite: Path, device: str, options: argparse.Namespace) -> None:
        self.suite = suite
        self.device = device
        self.options = options
        self.stop = time.time() + options.limit

    def path(self, mode: Mode, part: int = 0) -> Path:
        return self.options.out / f"{mode.value}{f'-{part}' if part else ''}.jsonl"

    def records(self, mode: Mode) -> Records:
        return of_mode(self.options.out, mode)

    def compare(self, modes: list[Mode]) -> list[Difference]:
        plain = self.records(Mode.PLAIN)
        return [
            difference
            for mode in modes
            if mode is not Mode.PLAIN
            for difference in differences(plain, self.records(mode), mode, EXPLAINED[mode])
        ]

    def run(self, mode: Mode) -> bool:
        """Runs the tests that `mode` has no line of yet. False when the time was over before the last."""
        print(f"== {mode.value}", flush=True)
        known = self.records(mode)
        if known.outcomes and len(known.outcomes) >= known.collected:
            return True
        jobs = self.options.jobs
        with ThreadPoolExecutor(jobs) as pool:
            return all(
                pool.map(lambda part: self._run(mode, self.path(mode, part), None, (part, jobs)), range(jobs))
            )

    def again(self, found: list[Difference]) -> None:
        """Runs tests that differ a second time, each mode in a new process, and takes down the outcomes."""
        with tempfile.TemporaryDirectory() as folder:
            for mode in {Mode.PLAIN, *(difference.mode for difference in found)}:
                tests = {d.test for d in found if mode in (Mode.PLAIN, d.mode)}
                names, records = Path(folder) / "names", Path(folder) / f"{mode.value}.jsonl"
                names.write_text("\n".join(sorted(tests)), encoding="utf-8")
                self._run(mode, records, names)
                with self.path(mode).open("a", encoding="utf-8") as file:
                    file.write(records.read_text(encoding="utf-8"))

    def _run(self, mode: Mode, records: Path, names: Path | None, part: tuple[int, int] = (0, 1)) -> bool:
        while True:
            before = len(read(records).outcomes)
            status, output = self._process(mode, records, names, part)
            unfinished = read(records).unfinished
            if unfinished is not None:  # it took the process with it: the next one goes on behind it
                line = {"test": unfinished, "outcome": "crashed", "served": 0, "seconds": 0.0}
                with records.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**line, "message": f"exit status {status}"}) + "\n")
            elif status not in (0, _LARGEST_PYTEST_STATUS_OF_A_RUN, 5):
                raise RuntimeError(f"pytest ended with status {status}:\n{output[-4000:]}")
            elif time.time() <= self.stop or len(read(records).outcomes) == before:
                return True
            if time.time() > self.stop:
                return False

    def _process(
        self, mode: Mode, records: Path, names: Path | None, part: tuple[int, int]
    ) -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as folder:
            settings = Path(folder) / "pytest.ini"
            settings.write_text("[pytest]\n", encoding="utf-8")
            command = [
                sys.executable, "-m", "pytest", str(self.suite), "-c", str(settings), "--noconftest", "-q",
                "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.torch_suite.plugin",
                "--suite-mode", mode.value, "--suite-device", self.device,
                "--suite-records", str(records.resolve()), "--suite-timeout", str(self.options.timeout),
                "--suite-stop", str(self.stop), "--suite-max-work", str(self.options.max_work),
                "--suite-part", *map(str, part),
            ]  # fmt: skip
            if names is not None:
                command += ["--suite-names", str(names)]
            if self.options.k:
                command += ["-k", self.options.k]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "PYTORCH_TESTING_DEVICE_ONLY_FOR": self.device,
            }
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            return done.returncode, done.stdout


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torch_suite", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("suite", type=Path, help=f"{NAME}, or a source tree of PyTorch")
    parser.add_argument("--modes", type=Mode, nargs="+", default=[Mode.ENABLED, Mode.SWAP])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees a GPU")
    parser.add_argument("-k", default="", help="only tests that pytest's -k picks")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes at a time, each with its share of tests"
    )
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each test")
    parser.add_argument(
        "--limit", type=float, default=1e9, help="seconds for this run; start it again to go on"
    )
    parser.add_argument(
        "--max-work", type=float, default=2**24, help="on the CPU: multiply-adds Sq·Sk·D·B·Hq"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "torch_suite")
    return parser


def _environment(device: str) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _as_json(difference: Difference) -> dict[str, Any]:
    return {
        "test": difference.test,
        "mode": difference.mode.value,
        "plain": difference.plain.outcome,
        "found": difference.found.outcome,
        "message": difference.found.message,
        "served": difference.found.served,
        "reason": difference.reason,
    }


def _print(report: dict[str, Any]) -> None:
    for mode, summary in report["modes"].items():
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in summary["outcomes"].items())
        print(f"{mode}: {summary['tests']} of {summary['collected']} tests: {outcomes}")
        if mode != Mode.PLAIN.value:
            left = sum(summary["calls_left_to_torch"].values())
            print(
                f"  calls served: {summary['calls_served']}, in {summary['tests_with_served_calls']} tests; "
                f"left to torch: {left}"
            )
    for line in report["left_out"]:
        print(f"left out: {line}")
    for found in report["differences"]:
        reason = found["reason"] or "NO REASON"
        print(f"only with the library ({found['mode']}): {found['test']}: {found['found']}: {reason}")
    if not report["finished"]:
        print("not finished: run it again to go on")


if __name__ == "__main__":
    sys.exit(main())
