"""The info command: on this machine, without usable libraries, and its judgement of made-up machines."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sdpa_cutlass.cli import info, inventory, main
from sdpa_cutlass.cli.inventory import Gpu, Inventory, LibraryFacts
from sdpa_cutlass.library import abi, launcher, locate
from sdpa_cutlass.library.device import has_machine_code
from sdpa_cutlass.library.locate import Target

HOST = LibraryFacts(
    target="host", path="/lib/host.so", version="0.1.0", digest="d" * 64, space="release", archs="",
    cuda_runtime=0, cutlass=420, kernels={"fmha_fwd": {32: 2, 64: 6}, "unfused": {64: 4}},
    kinds={"fmha_fwd": ["exact, code for 89"], "unfused": ["rounded logits, code for 89"]},
    codes={"fmha_fwd": ["89"], "unfused": ["89"]},
)  # fmt: skip
CUDA = dataclasses.replace(HOST, target="cuda", path="/lib/cuda.so", archs="89", cuda_runtime=13000)
L4 = Gpu(name="NVIDIA L4", compute_capability=(8, 9), sms=58, memory_bytes=24 * 2**30)
GOOD = Inventory(
    package="0.1.0",
    python="3.11.7",
    platform="Linux x86_64",
    libraries=(CUDA, HOST),
    launcher="/lib/_launcher.abi3.so",
    gpus=(L4,),
    driver="580.1",
    driver_cuda=13000,
    torch="2.13.0",
    torch_cuda="13.0",
    cuda_python="13.0.3",
    nvcc="13.0 (wheel)",
    cutlass_wheel="4.2.0.0",
    compiler="g++ 12.2.0",
    cli_packages={"rich": "15.0.0"},
)
NOT_THERE = {"error": "not found\nTried: a, b", "missing": True, "path": None}
NO_GPU = {"gpus": (), "driver": None, "driver_cuda": None, "torch_cuda": None}

REPORT = """\
sdpa_cutlass 0.1.0, Python 3.11.7, Linux x86_64

What works here
  on a GPU     yes: NVIDIA L4, 12 kernels
  on the CPU   no: the host library cannot be used
  from torch   yes: torch 2.13.0
  commands     yes

The cuda library (for NVIDIA GPUs)
  file         /lib/cuda.so
  built        version 0.1.0, space release, digest dddddddddddddddd
  with         CUDA 13.0, CUTLASS 4.2.0
  for          sm_89
  fmha_fwd     8 kernels (exact, code for 89): 2 of head_dim 32, 6 of head_dim 64
  unfused      4 kernels (rounded logits, code for 89): 4 of head_dim 64

The host library (the same kernels on the CPU)
  not found
  Tried: a, b

The compiled launcher (optional, for shorter calls)
  file         /lib/_launcher.abi3.so

This machine
  GPU 0        NVIDIA L4, sm_89, 58 SMs, 24 GiB
    runs       fmha_fwd, unfused: machine code
  driver       580.1, CUDA 13.0
  torch        2.13.0, CUDA 13.0
  cuda-python  13.0.3
  nvcc         13.0 (wheel)
  CUTLASS      nvidia-cutlass 4.2.0.0
  compiler     g++ 12.2.0
  rich         15.0.0

Problems
  - the host library is not built
    fix: run `make host` in a checkout, or `pip install .`"""


def test_report() -> None:
    found = dataclasses.replace(GOOD, libraries=(CUDA, dataclasses.replace(HOST, **NOT_THERE)))
    assert info.render(found, inventory.problems(found)) == REPORT


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"on a GPU": "yes: NVIDIA L4, 12 kernels", "on the CPU": "yes: 12 kernels, for correctness"}),
        (NO_GPU, {"on a GPU": "no: no GPU", "from torch": "yes: torch 2.13.0"}),
        ({"libraries": (HOST,)}, {"on a GPU": "no: the cuda library cannot be used"}),
        (
            {"driver_cuda": 12040},
            {"on a GPU": "no: the driver supports CUDA 12.4, the library needs 13.0"},
        ),
        (
            {"gpus": (dataclasses.replace(L4, name="NVIDIA T4", compute_capability=(7, 5)),)},
            {"on a GPU": "no: the library was built for 89, but NVIDIA T4 is sm_75"},
        ),
        (
            {"torch": None},
            {"from torch": "no: arrays of other libraries alone", "commands": "no: they need torch"},
        ),
        ({"cli_packages": {"rich": None}}, {"commands": "no: they need rich"}),
        (
            {"launcher": "it is refused", "launcher_is_refused": True},
            {"on a GPU": "no: it is refused", "on the CPU": "no: it is refused"},
        ),
    ],
)
def test_what_works(changes: dict[str, object], expected: dict[str, str]) -> None:
    found = inventory.works(dataclasses.replace(GOOD, **changes))  # type: ignore[arg-type]
    assert {name: found[name] for name in expected} == expected


def test_why_there_is_no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert inventory.launcher_facts()[0].endswith(("_launcher.abi3.so", "free-threaded"))
    monkeypatch.setenv("SDPA_CUTLASS_LAUNCHER", "no")
    text, is_refused = inventory.launcher_facts()
    assert "allowed is 'off'" in text
    assert is_refused
    monkeypatch.setenv("SDPA_CUTLASS_LAUNCHER", "off")
    monkeypatch.setattr(launcher, "module", launcher.module.__wrapped__)
    assert inventory.launcher_facts() == ("SDPA_CUTLASS_LAUNCHER=off", False)
    monkeypatch.delenv("SDPA_CUTLASS_LAUNCHER")
    monkeypatch.setattr(locate, "__file__", str(tmp_path / "package" / "library" / "locate.py"))
    assert inventory.launcher_facts() == (inventory.NO_LAUNCHER, False)
    (tmp_path / "package").mkdir(mode=0o755)
    (tmp_path / "CMakeLists.txt").touch()
    file = tmp_path / "package" / "_launcher.abi3.so"
    file.write_bytes(b"no module")
    file.chmod(0o644)
    assert inventory.launcher_facts() == (f"not used: {file} is not for this Python and package", False)
    monkeypatch.setattr(launcher, "module", lambda: launcher)
    monkeypatch.setattr(launcher, "exchange", lambda: None)
    assert inventory.launcher_facts() == ("not used: torch has no DLPack exchange API", False)


def test_a_refused_launcher_leaves_the_facts_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDPA_CUTLASS_LAUNCHER", "no")
    monkeypatch.setattr(launcher, "module", launcher.module.__wrapped__)
    monkeypatch.setattr(abi, "_loaded", {})
    assert inventory.library_facts(Target.HOST).error is None


@pytest.mark.parametrize(
    ("capability", "served"),
    [
        ((8, 9), {inventory.MACHINE_CODE: ["fmha_fwd"], inventory.NO_CODE: ["fmha_fwd_sm90"]}),
        ((9, 0), {inventory.MACHINE_CODE: ["fmha_fwd_sm90"], inventory.PTX: ["fmha_fwd"]}),
        ((12, 0), {inventory.PTX: ["fmha_fwd"], inventory.NO_CODE: ["fmha_fwd_sm90"]}),
        ((8, 6), {inventory.NO_CODE: ["fmha_fwd", "fmha_fwd_sm90"]}),
    ],
)
def test_what_is_native_and_what_the_driver_compiles(
    capability: tuple[int, int], served: dict[str, list[str]]
) -> None:
    facts = dataclasses.replace(CUDA, codes={"fmha_fwd": ["89"], "fmha_fwd_sm90": ["90a-real"]})
    gpu = dataclasses.replace(L4, compute_capability=capability)
    assert inventory.how_served(facts, gpu) == served
    text = info.render(dataclasses.replace(GOOD, libraries=(facts, HOST), gpus=(gpu,)), [])
    for kind, families in served.items():
        assert f"    runs       {', '.join(families)}: {kind}\n" in text


@pytest.mark.parametrize(
    ("archs", "capability", "native"),
    [
        ("80;89", (8, 0), True),
        ("80;89", (8, 6), True),
        ("80-virtual;89", (8, 6), False),
        ("89", (8, 6), False),
        ("89;90-real", (9, 0), True),
        ("90a-real", (9, 0), True),
        ("90a-real", (10, 0), False),
        ("", (8, 9), False),
    ],
)
def test_machine_code_is_told_from_ptx(archs: str, capability: tuple[int, int], native: bool) -> None:
    assert has_machine_code(archs, capability) is native


def test_nothing_wrong() -> None:
    assert inventory.problems(GOOD) == []
    assert info.render(GOOD, []).endswith("\nNo problems found.")


def test_a_cpu_machine_needs_no_cuda_library() -> None:
    found = dataclasses.replace(GOOD, libraries=(dataclasses.replace(CUDA, **NOT_THERE), HOST), **NO_GPU)
    assert inventory.problems(found) == []


WITHOUT_CUDA = (dataclasses.replace(CUDA, **NOT_THERE), HOST)
BROKEN_HOST = (CUDA, dataclasses.replace(HOST, error="host.so cannot be loaded"))
OLD_GPU = dataclasses.replace(L4, compute_capability=(8, 6))
TROUBLES = {
    "no cuda library": ({"libraries": WITHOUT_CUDA}, "the cuda library is not built", "make cuda"),
    "broken library": ({"libraries": BROKEN_HOST}, "host.so cannot be loaded", "make host"),
    "no torch": ({"torch": None}, "torch is not installed", r"pip install 'sdpa_cutlass\[torch\]'"),
    "broken torch": ({"torch": None, "torch_error": "cannot import"}, "cannot import", "pip install"),
    "torch for CPUs": ({"torch_cuda": None, "gpus": ()}, "built without CUDA", "CUDA build of torch"),
    "hidden GPU": ({"gpus": ()}, "torch finds no GPU", "CUDA_VISIBLE_DEVICES"),
    "old driver": ({"driver_cuda": 12080}, "CUDA 12.8, the library needs 13.0", "update the NVIDIA driver"),
    "no cuda-python": ({"driver_cuda": None}, "cuda-python finds no driver", "cuda-python>=12"),
    "old GPU": ({"gpus": (OLD_GPU,)}, "NVIDIA L4 is sm_86", "-DSDPA_CUDA_ARCHS=86"),
    "launcher": (
        {"launcher": "it is 'no'", "launcher_is_refused": True},
        "it is 'no'",
        "SDPA_CUTLASS_LAUNCHER=off",
    ),
    "packages": ({"cli_packages": {"rich": None, "matplotlib": "3"}}, "the commands need rich$", "cli"),
    "forced": ({"forced_kernel": "*d64*"}, r"'\*d64\*' narrows", "unset SDPA_CUTLASS_FORCE_KERNEL"),
}


@pytest.mark.parametrize(("changes", "what", "fix"), TROUBLES.values(), ids=TROUBLES.keys())
def test_trouble(changes: dict[str, object], what: str, fix: str) -> None:
    (trouble,) = inventory.problems(dataclasses.replace(GOOD, **changes))  # type: ignore[arg-type]
    assert re.search(what, trouble.what)
    assert re.search(fix, trouble.fix)
    assert "\n" not in trouble.fix


def test_nothing_to_build_with() -> None:
    missing = tuple(dataclasses.replace(facts, **NOT_THERE) for facts in (CUDA, HOST))
    found = dataclasses.replace(GOOD, libraries=missing, nvcc=None, compiler=None, **NO_GPU)
    fixes = [trouble.fix for trouble in inventory.problems(found)]
    assert len(fixes) == 4
    assert any("cuda-toolkit" in fix for fix in fixes)
    assert any("g++" in fix for fix in fixes)


def test_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--kernels", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    host = document["libraries"][1]
    assert host["error"] is None
    assert host["target"] == "host"
    kernels = document["kernels"]["host"]
    assert len(kernels) == sum(sum(dims.values()) for dims in host["kernels"].values())
    for kernel in kernels:
        limit = 232448 if "_sm90_" in kernel["name"] else 101376  # bytes of a CTA
        assert kernel["smem_bytes"] <= limit, kernel["name"]
    assert main(["info", "--kernels"]) == 0
    assert kernels[0]["name"] in capsys.readouterr().out


def test_libraries_missing_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    garbage = tmp_path / "garbage.so"
    garbage.write_text("not a library")
    tmp_path.chmod(0o755)
    monkeypatch.setenv("SDPA_CUTLASS_HOST_LIBRARY", str(garbage))
    monkeypatch.setenv("SDPA_CUTLASS_LIBRARY", str(tmp_path / "absent.so"))
    monkeypatch.setattr("sdpa_cutlass.library.abi._loaded", {})
    assert main(["info", "--kernels"]) == 0
    text = capsys.readouterr().out
    assert f"{garbage} cannot be loaded" in text
    assert "libsdpa_cutlass.so was not found" in text
    assert "fix: run `make host` in a checkout" in text


def test_kernels_are_aligned() -> None:
    row = {"name": "k", "smem_bytes": 49152, "ctas_per_sm": 2, "registers": None, "local_bytes": None,
           "ctas_per_sm_here": None}  # fmt: skip
    text = info.render_kernels([row, row | {"name": "long_name", "registers": 128}])
    assert text.splitlines() == [
        "kernel     smem bytes  CTAs/SM on sm_89  registers",
        "k               49152                 2          -",
        "long_name       49152                 2        128",
    ]


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"], ["info", "--help"], ["--version"]])
def test_help_imports_nothing_slow(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom sdpa_cutlass.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "slow = {'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)\nassert not slow, slow\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "sdpa_cutlass" in done.stdout


def test_kernels_that_merge_are_counted() -> None:
    facts = inventory.library_facts(Target.HOST)
    assert facts.kernels["combine"] == {256: 3}
    assert facts.kinds["combine"] == ["exact, code for 89"]
