"""What the package and its build must never do: run text, unpickle, talk to a network, load from anywhere.

The first half reads the source: `findings` is a small scanner with its own tests. The second half runs calls
with Python's audit hooks watching.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN_TIME = sorted((ROOT / "sdpa_cutlass").rglob("*.py"))
BUILD_TIME = sorted(
    path for folder in ("generator", "cmake", "packaging") for path in (ROOT / folder).rglob("*.py")
)
CMAKE = sorted(
    [ROOT / "CMakeLists.txt", *(ROOT / "cmake").rglob("*.cmake"), *(ROOT / "cmake").rglob("*.txt")]
)

UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
NETWORK = {
    "socket", "socketserver", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "aiohttp", "ftplib",
    "smtplib", "telnetlib", "xmlrpc", "webbrowser", "asyncio", "huggingface_hub",
}  # fmt: skip
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
SHELL = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "commands.getoutput"}
LOADS_OBJECTS = {"torch.load", "torch.jit.load", "numpy.load", "np.load", "yaml.load", "ast.literal_eval"}
LOADS_LIBRARIES = {
    "ctypes.CDLL",
    "ctypes.PyDLL",
    "ctypes.cdll.LoadLibrary",
    "ctypes.util.find_library",
    "CDLL",
}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield node.module or ""


def findings(source: str) -> list[str]:
    """What the source imports or calls and must not, as `what: name`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for module in _imported(node):
            top = module.split(".")[0]
            found += [f"unpickling: {module}"] * (top in UNPICKLING)
            found += [f"network: {module}"] * (top in NETWORK)
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        found += [f"runs text: {name}"] * (name in RUNS_TEXT or name.removeprefix("builtins.") in RUNS_TEXT)
        found += [f"shell: {name}"] * (name in SHELL)
        found += [f"loads objects: {name}"] * (name in LOADS_OBJECTS)
        found += [f"loads a library: {ast.unparse(node)}"] * (name in LOADS_LIBRARIES)
        for keyword in node.keywords:
            if keyword.arg == "shell" and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ):
                found.append(f"shell: {name}")
            if keyword.arg == "allow_pickle":
                found.append(f"unpickling: {name}")
    return found


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "unpickling: pickle"),
        ("def f():\n  from marshal import loads", "unpickling: marshal"),
        ("import urllib.request", "network: urllib.request"),
        ("from http.client import HTTPSConnection", "network: http.client"),
        ("eval('1')", "runs text: eval"),
        ("builtins.exec(x)", "runs text: builtins.exec"),
        ("os.system('ls')", "shell: os.system"),
        ("subprocess.run('ls', shell=True)", "shell: subprocess.run"),
        ("subprocess.Popen(x, shell=flag)", "shell: subprocess.Popen"),
        ("torch.load(path)", "loads objects: torch.load"),
        ("numpy.loadtxt(x, allow_pickle=True)", "unpickling: numpy.loadtxt"),
        ("ctypes.CDLL('libx.so')", "loads a library: ctypes.CDLL('libx.so')"),
    ],
)
def test_the_scanner_finds(source: str, what: str) -> None:
    assert findings(source) == [what]


def test_the_scanner_lets_through() -> None:
    harmless = "import json\nsubprocess.run(['ls'], shell=False)\nmodel.eval()\nre.compile('x')"
    assert findings(harmless) == []


@pytest.mark.parametrize("path", [*RUN_TIME, *BUILD_TIME], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_file_does_what_it_must_not(path: Path) -> None:
    loads = ["loads a library: ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)"]
    expected = loads if path == ROOT / "sdpa_cutlass/library/abi.py" else []
    assert findings(path.read_text(encoding="utf-8")) == expected


def test_the_scan_is_of_the_whole_package() -> None:
    assert len(RUN_TIME) > 40
    assert ROOT / "sdpa_cutlass/cli/compare.py" in RUN_TIME
    assert ROOT / "packaging/wheel_backend.py" in BUILD_TIME
    assert ROOT / "cmake/resource_usage.py" in BUILD_TIME
    assert ROOT / "cmake/cuda/CMakeLists.txt" in CMAKE


DOWNLOADS = re.compile(
    r"FetchContent|ExternalProject|file\s*\(\s*DOWNLOAD|\b(?:curl|wget|git|pip|uv)\s+(?:install|clone|fetch|-|http)"
    r"|https?://",
    re.IGNORECASE,
)


def cmake_commands(text: str) -> str:
    """The text without comments and without what a message tells the reader to do."""
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"(?:message\s*\(|set\(_install_hint)[^)]*(?:\([^)]*\)[^)]*)*\)", "", text)


@pytest.mark.parametrize("path", CMAKE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_build_downloads_nothing(path: Path) -> None:
    assert DOWNLOADS.findall(cmake_commands(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "text",
    [
        "include(FetchContent)",
        "ExternalProject_Add(cutlass)",
        'file(DOWNLOAD "${url}" x)',
        'file( download "${url}" x)',
        "execute_process(COMMAND git clone x)",
        "execute_process(COMMAND ${Python_EXECUTABLE} -m pip install x)",
        'set(URL "https://example.com/x.tar.gz")',
    ],
)
def test_a_download_in_cmake_is_found(text: str) -> None:
    assert DOWNLOADS.findall(cmake_commands(f"# a comment\n{text}\n"))


def run_python(code: str, *, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_working_directory_and_search_path_are_never_looked_at(tmp_path: Path) -> None:
    """Libraries of our names lie in wait: loading one would fail."""
    for folder in (tmp_path, tmp_path / "build" / "lib"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("libsdpa_cutlass.so", "libsdpa_cutlass_host.so", "libsdpa_cutlass_host"):
            (folder / name).write_text("a trap")
    code = (
        "from sdpa_cutlass.library import locate\n"
        "for target in locate.Target:\n"
        "    for place in locate.candidates(target): print(place)\n"
        "from sdpa_cutlass.library.abi import library\n"
        "print(library(locate.Target.HOST).path)\n"
    )
    done = run_python(
        code, cwd=tmp_path, LD_LIBRARY_PATH=str(tmp_path), PATH=f"{tmp_path}:{os.environ['PATH']}"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3
    assert str(tmp_path) not in done.stdout


WATCHED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pickle.", "urllib.",
    "http.", "ftplib.", "smtplib.", "webbrowser.",
)  # fmt: skip


def test_calls_run_nothing_and_talk_to_nobody(tmp_path: Path) -> None:
    """After the imports, no call opens a socket, starts a process or unpickles, whatever it is given."""
    code = f"""
import sys, torch
import sdpa_cutlass
from sdpa_cutlass.integrations import torch_sdpa
seen = []
sys.addaudithook(lambda event, arguments: seen.append(event) if event.startswith({WATCHED!r}) else None)
q = torch.randn(2, 2, 33, 64).half()
mask = torch.rand(33, 33) > 0.3
lengths = torch.tensor([20, 33], dtype=torch.int32)
sdpa_cutlass.attention(q, q, q, causal="top_left", return_lse=True)
sdpa_cutlass.attention(q, q, q, attn_mask=mask, seqlens_k=lengths, p_dropout=0.2)
sdpa_cutlass.unfused_attention(q, q, q)
sdpa_cutlass.explain(q, q, q)
with sdpa_cutlass.enabled():
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
print("calls:", seen)
import subprocess
subprocess.run(["true"])
print("seen:", bool(seen))
"""
    done = run_python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["calls: []", "seen: True"]
