"""The generated text: goldens, determinism, and what each file promises to the others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from generator.core import arch
from generator.core.arch import Arch
from generator.core.family import TEMPLATES
from generator.core.render import MANIFEST, MARKER, Sources, UnprintableValueError, manifest_row, render
from generator.core.space import Space
from generator.families import FAMILIES

ROOT = TEMPLATES.parent


def test_goldens(tiny: Space, sources: Sources, goldens: Path, update_goldens: bool) -> None:
    files = render(tiny, sources)
    if update_goldens:
        for golden in goldens.iterdir():
            golden.unlink()
        for path, text in files.items():
            (goldens / Path(path).name).write_text(text, encoding="utf-8")
    assert sorted(path.name for path in goldens.iterdir()) == sorted(Path(path).name for path in files)
    for path, text in files.items():
        expected = (goldens / Path(path).name).read_text(encoding="utf-8")
        assert text == expected, f"{path}: if that is meant, run: pytest tests/generator --update-goldens"


@pytest.fixture(scope="module")
def release() -> Space:
    return FAMILIES.build("release")


@pytest.fixture(scope="module")
def files(release: Space) -> dict[str, str]:
    return render(release, Sources.load())


def test_one_unit_for_each_group(release: Space, files: dict[str, str]) -> None:
    assert set(files) == {c.unit for c in release.kernels} | {"registry.cpp", "sources.cmake", MANIFEST}


def test_every_kernel_is_a_row_of_its_unit_and_of_no_other(release: Space, files: dict[str, str]) -> None:
    rows: dict[str, list[str]] = {}
    for path, text in files.items():
        if path.startswith("units/"):
            for name in re.findall(r'"(\w+)", "\w+", SDPA_OP_', text):
                rows.setdefault(name, []).append(path)
    assert rows == {c.name: [c.unit] for c in release.kernels}


def test_registry_counts_what_the_units_define(files: dict[str, str]) -> None:
    defined = {
        match[1]: int(match[2])
        for path, text in files.items()
        if path.startswith("units/")
        for match in re.finditer(r"extern const KernelRow (k\w+_rows)\[(\d+)\] = \{", text)
    }
    declared = dict(re.findall(r"extern const KernelRow (k\w+_rows)\[(\d+)\];", files["registry.cpp"]))
    listed = dict(re.findall(r"\{(k\w+_rows), (\d+)\}", files["registry.cpp"]))
    assert defined == {name: int(count) for name, count in declared.items()}
    assert declared == listed
    assert f"kNumRowSpans = {len(defined)};" in files["registry.cpp"]
    for path, text in files.items():
        if path.startswith("units/"):
            count = len(re.findall(r"make_row<[^(]+>\(", text))
            assert f"k{Path(path).stem}_rows[{count}]" in text


def test_sources_cmake_lists_the_units(files: dict[str, str]) -> None:
    listed = re.findall(r"^  (units/\S+)$", files["sources.cmake"], re.MULTILINE)
    assert listed == sorted(path for path in files if path.startswith("units/"))


def test_units_of_a_family_and_an_architecture_are_a_set(release: Space, files: dict[str, str]) -> None:
    text = files["sources.cmake"]
    names = re.search(r"^set\(SDPA_GENERATED_SETS\n(.*?)^\)$", text, re.MULTILINE | re.DOTALL)
    assert names is not None
    assert names[1].split() == sorted({f"{c.family}_{c.arch.value}" for c in release.kernels})
    for kernel in release.kernels:
        name = f"{kernel.family}_{kernel.arch.value}"
        units = re.search(rf"^set\(SDPA_UNITS_{name}\n(.*?)^\)$", text, re.MULTILINE | re.DOTALL)
        assert units is not None
        assert f"  {kernel.unit}\n" in units[1]
        assert f"set(SDPA_ARCHS_{name} {kernel.arch.limits.cmake_architectures})\n" in text


def test_manifest_has_the_files_and_the_rows_of_the_c_abi(release: Space, files: dict[str, str]) -> None:
    manifest = json.loads(files[MANIFEST])
    assert manifest["files"] == sorted(set(files) - {MANIFEST})
    assert (manifest["space"], manifest["filter"]) == ("release", None)
    in_order = sorted(release.kernels, key=lambda c: (c.group, c.name))  # as the library's registry
    assert [row["name"] for row in manifest["kernels"]] == [c.name for c in in_order]
    header = (ROOT / "templates/include/sdpa/c_api.h").read_text(encoding="utf-8")
    body = re.search(r"typedef struct sdpa_kernel_info \{(.*?)\} sdpa_kernel_info;", header, re.DOTALL)
    assert body is not None
    fields = set(re.findall(r"(\w+);", body[1])) - {"struct_size", "num_details"}
    for row in manifest["kernels"]:
        assert set(row) == fields | {"symbols", "group", "file"}


def test_rows_know_the_resources_of_fused_kernels_only(release: Space) -> None:
    for config in release.kernels:
        row = manifest_row(config)
        if config.functions:
            assert (row["smem_bytes"], row["ctas_per_sm"]) == (config.smem_bytes, config.ctas_per_sm)
        else:
            assert (row["smem_bytes"], row["ctas_per_sm"]) == (None, None)


def test_every_function_of_the_manifest_is_defined_and_registered_once(files: dict[str, str]) -> None:
    units = "\n".join(text for path, text in files.items() if path.startswith("units/"))
    defined = re.findall(r"^void (\w+)\(", units, re.MULTILINE)
    lists = re.findall(r"Functions?<\w+((?:,\s+&\w+)+)>", units)
    registered = [symbol for symbols in lists for symbol in re.findall(r"&(\w+)", symbols)]
    rows = json.loads(files[MANIFEST])["kernels"]
    symbols = [symbol for row in rows for symbol in row["symbols"] or ()]
    assert sorted(defined) == sorted(registered) == sorted(symbols)
    for row in rows:
        functions = 1 + sum(name in row["takes"] for name in ("bool", "bias16", "bias32"))
        functions += "splits" in row["takes"] and row["family"] != "fmha_fwd_q8"  # that merges parts
        functions += row["family"] in ("fmha_fwd_q8", "fmha_fwd_q8_sm90")  # the one that quantises
        functions += row["family"] == "fmha_fwd_sm90" and "bool" in row["takes"]  # that finds a mask's blocks
        if row["family"] == "fmha_bwd":  # any mask in one; more: a bias's gradient, its sum, statistics
            functions = 4 if "dropout" in row["takes"] else 5
        if row["family"] == "fmha_bwd_fused":  # one for all gradients, sums of dQ to dQ, statistics
            functions = 3
        assert len(row["symbols"] or ()) == (0 if row["family"] == "unfused" else functions)


def test_one_digest_everywhere(files: dict[str, str]) -> None:
    digest = json.loads(files[MANIFEST])["digest"]
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert f'kGeneratorDigest = "{digest}"' in files["registry.cpp"]
    assert f"set(SDPA_GENERATED_DIGEST {digest})" in files["sources.cmake"]


def test_text_is_tidy(files: dict[str, str]) -> None:
    for path, text in files.items():
        assert text.endswith("\n"), path
        assert not text.endswith("\n\n"), path
        assert "\n\n\n" not in text, path
        assert "\t" not in text, path
        assert "\r" not in text, path
        for line in text.splitlines():
            assert line == line.rstrip(), f"{path}: {line!r}"
            assert len(line) <= 120, f"{path}: {line!r}"
        if path != MANIFEST:
            assert MARKER in text.splitlines()[0], path
            assert ".j2" in text.splitlines()[0], path


def test_kernel_symbols_do_not_hold_the_word(files: dict[str, str]) -> None:
    symbols = [
        symbol for text in files.values() for symbol in re.findall(r"^void (\w+)\(", text, re.MULTILINE)
    ]
    assert len(symbols) == len(set(symbols)) > 20
    assert [symbol for symbol in symbols if "cutlass" in symbol] == []


def test_a_header_changes_the_digest_and_no_unit(tiny: Space, sources: Sources) -> None:
    before = render(tiny, sources)
    after = render(tiny, replace(sources, digest="1" * 64))
    assert {path for path in before if before[path] != after[path]} == {
        "registry.cpp",
        "sources.cmake",
        MANIFEST,
    }


def test_a_template_changes_the_digest_of_its_units(tiny: Space, sources: Sources) -> None:
    text = sources.templates["unfused.cu.j2"] + "{# a comment #}"
    before = render(tiny, sources)
    after = render(tiny, replace(sources, templates={**sources.templates, "unfused.cu.j2": text}))
    assert {path for path in before if before[path] != after[path]} == {"units/unfused_sm89_m64n64_s4_w4.cu"}


def test_a_kernel_changes_its_unit_and_the_lists(tiny: Space, sources: Sources) -> None:
    before = render(tiny, sources)
    after = render(replace(tiny, kernels=tiny.kernels[1:]), sources)
    changed = {path for path in before if before[path] != after[path]}
    assert changed == {tiny.kernels[0].unit, "registry.cpp", "sources.cmake", MANIFEST}


def test_the_order_of_a_space_does_not_matter(tiny: Space, sources: Sources) -> None:
    assert render(replace(tiny, kernels=tiny.kernels[::-1]), sources) == render(tiny, sources)


def test_a_filtered_library_says_so(sources: Sources) -> None:
    files = render(FAMILIES.build("release").filtered("*_d64_*'\"; evil"[:7]), sources)
    assert 'kSpaceName = "release_filtered"' in files["registry.cpp"]
    manifest = json.loads(files[MANIFEST])
    assert (manifest["space"], manifest["filter"]) == ("release_filtered", "*_d64_*")


@pytest.mark.parametrize("glob", ['*"; system("x"); "*', "*\n*", "[*]"])
def test_a_filter_is_never_printed_into_code(glob: str, tiny: Space, sources: Sources) -> None:
    files = render(replace(tiny, filter=glob), sources)
    plain = render(replace(tiny, filter="x"), sources)
    for path in set(files) - {MANIFEST}:
        digests = re.compile("[0-9a-f]{64}")
        assert digests.sub("", files[path]) == digests.sub("", plain[path])


@pytest.mark.parametrize("value", ['"', "a b", "a;b", "a::", "", "é", "a-b", "90a-", 1.5, None, [1]])
def test_templates_print_names_and_numbers_only(value: object, tiny: Space, sources: Sources) -> None:
    template = "{{ VALUE }}\n" if not isinstance(value, str) else "{{ '" + value + "' }}\n"
    template = template.replace("VALUE", repr(value))
    broken = replace(sources, templates={**sources.templates, "registry.cpp.j2": template})
    with pytest.raises(UnprintableValueError, match="may not print"):
        render(tiny, broken)


def test_templates_print_architectures(tiny: Space, sources: Sources) -> None:
    template = "{{ '90a-real' }} {{ '89' }} {{ '80-virtual' }}\n"
    files = render(tiny, replace(sources, templates={**sources.templates, "registry.cpp.j2": template}))
    assert files["registry.cpp"] == "90a-real 89 80-virtual\n"


def test_what_units_say_of_the_architecture_is_its_own(
    tiny: Space, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(Arch.SM89.limits, compute_capability=77, cmake_architectures="77a-real")
    monkeypatch.setitem(arch._LIMITS, Arch.SM89, other)
    files = render(tiny, sources)
    for kernel in tiny.kernels:
        if kernel.arch is Arch.SM89:
            assert re.search(r'\b77, "77a-real",', files[kernel.unit])
            assert not re.search(r"\b89\b", files[kernel.unit])
        else:
            assert re.search(r'\b90, "90a-real",', files[kernel.unit])
    rows = json.loads(files[MANIFEST])["kernels"]
    assert {(row["arch"], row["code"]) for row in rows} == {(77, "77a-real"), (90, "90a-real")}


def test_a_misspelt_variable_is_an_error(tiny: Space, sources: Sources) -> None:
    text = sources.templates["unfused.cu.j2"].replace("kernel.head_dim", "kernel.headdim")
    assert text != sources.templates["unfused.cu.j2"]
    with pytest.raises(Exception, match="headdim"):
        render(tiny, replace(sources, templates={**sources.templates, "unfused.cu.j2": text}))


def test_sources_digest_covers_headers_and_ignores_the_rest(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "a.j2").write_text("a")
    (tmp_path / "include" / "b.cuh").write_text("b")
    first = Sources.load(tmp_path)
    assert dict(first.templates) == {"a.j2": "a"}
    (tmp_path / "include" / "README.md").write_text("c")
    (tmp_path / "include" / ".b.cuh.swp").write_text("d")
    (tmp_path / "include" / ".hidden.cuh").write_text("e")
    assert Sources.load(tmp_path) == first
    (tmp_path / "include" / "b.cuh").write_text("B")
    second = Sources.load(tmp_path)
    (tmp_path / "include" / "b.cuh").rename(tmp_path / "include" / "c.cuh")
    third = Sources.load(tmp_path)
    assert len({first.digest, second.digest, third.digest}) == 3


def test_sources_digest_does_not_depend_on_the_order_of_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Sources.load()
    listed = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(list(listed(self, pattern))))
    assert Sources.load() == expected


def test_no_templates_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no templates"):
        Sources.load(tmp_path)


def test_same_bytes_whatever_hash_seed_locale_or_directory(tmp_path: Path) -> None:
    outputs = []
    for i, (seed, locale) in enumerate((("0", "C"), ("1", "C.UTF-8"), ("4711", "tr_TR.UTF-8"))):
        folder = tmp_path / f"cwd{i}"
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale, "PYTHONPATH": str(ROOT)}
        environment |= {"TZ": "Asia/Kathmandu"} if i else {}
        out = tmp_path / f"out{i}"
        command = [sys.executable, "-m", "generator", "--space", "smoke", "--out", str(out)]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        files = (path for path in out.rglob("*") if path.is_file())
        outputs.append({path.relative_to(out).as_posix(): path.read_bytes() for path in files})
    assert outputs[0]
    assert outputs[1] == outputs[0]
    assert outputs[2] == outputs[0]
    for content in outputs[0].values():
        assert str(ROOT).encode() not in content
        assert str(tmp_path).encode() not in content
