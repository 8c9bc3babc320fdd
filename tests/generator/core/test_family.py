"""The list of families: what may be in it, whose a name is, and that an arch brings no kernel by itself."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from generator.core.arch import Arch
from generator.core.family import TEMPLATES, Families, Family, FamilyError
from generator.core.kernel import Kernel, Op, Takes
from generator.core.space import SPACES
from generator.core.tags import InvalidNameError, TagError
from generator.families import FAMILIES
from generator.families.fmha_fwd import FMHA_FWD
from generator.families.unfused import UNFUSED, tiles
from generator.families.unfused.config import Unfused

ROOT = TEMPLATES.parent


def _renamed(name: str) -> Family:
    """The baseline under another name."""

    class Renamed(Unfused):
        family: ClassVar[str] = name

    def smoke() -> tiles.Listing:
        kernel = UNFUSED.sample
        return tiles.Listing(
            kernels=[Renamed(arch=kernel.arch, head_dim=64, tile=kernel.tile, dtype=kernel.dtype)]
        )

    return replace(UNFUSED, kernel=Renamed, spaces=dict.fromkeys(SPACES, smoke))


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """A folder with what the families of these tests need."""
    for name in ("unfused", "fmha_fwd", "piped", "unfused_sm89"):
        (tmp_path / "include/sdpa" / name).mkdir(parents=True)
        (tmp_path / f"{name}.cu.j2").touch()
    return tmp_path


def test_families_side_by_side(templates: Path) -> None:
    families = Families(FMHA_FWD, UNFUSED, _renamed("piped"), templates=templates)
    kernel = families.parse("piped_sm89_d64_m64n64_s4_w4_f16_causal")
    assert families.of(kernel).name == "piped"
    assert families.refusal(kernel) is None
    assert {kernel.family for kernel in families.build("smoke").kernels} == {"fmha_fwd", "unfused", "piped"}


def test_a_family_that_is_listed_twice_is_an_error(templates: Path) -> None:
    with pytest.raises(FamilyError, match="names with unfused_sm89_ could be of family unfused or unfused"):
        Families(UNFUSED, UNFUSED, templates=templates)


@pytest.mark.parametrize("other_first", [False, True])
def test_names_that_two_families_could_have_are_an_error(templates: Path, other_first: bool) -> None:
    families = [UNFUSED, _renamed("unfused_sm89")]
    with pytest.raises(FamilyError, match="names with unfused_sm89_sm89_ could be of family unfused or"):
        Families(*families[:: -1 if other_first else 1], templates=templates)


def test_a_family_without_a_template_or_headers_is_an_error(templates: Path) -> None:
    with pytest.raises(FamilyError, match=r"family other needs templates/other\.cu\.j2"):
        Families(_renamed("other"), templates=templates)
    (templates / "other.cu.j2").touch()
    with pytest.raises(FamilyError, match="family other needs templates/include/sdpa/other"):
        Families(_renamed("other"), templates=templates)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rules": ()}, "must have rules"),
        ({"rules": (*UNFUSED.rules, UNFUSED.rules[0])}, "each with a name of its own"),
        (
            {"spaces": {"smoke": tiles.smoke, "release": tiles.release}},
            "must list the spaces smoke, release,",
        ),
    ],
)
def test_a_family_without_rules_or_spaces_is_an_error(changes: Mapping[str, object], message: str) -> None:
    with pytest.raises(FamilyError, match=f"family unfused {message}|{message}"):
        Families(replace(UNFUSED, **changes))  # type: ignore[arg-type]


def test_a_kernel_class_that_leaves_a_question_open_is_an_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Silent(Kernel):
        family: ClassVar[str] = "unfused"

        @property
        def takes(self) -> Takes:
            return Takes.FULL

    missing = "Silent does not say its op, archs, accumulator_registers, registers, smem_bytes"
    with pytest.raises(FamilyError, match=missing):
        Families(replace(UNFUSED, kernel=Silent))


def test_a_family_without_archs_is_an_error() -> None:
    class Nowhere(Unfused):
        archs: ClassVar[tuple[Arch, ...]] = ()

    with pytest.raises(FamilyError, match="family unfused must have archs"):
        Families(replace(UNFUSED, kernel=Nowhere))


def test_a_unit_that_could_be_another_familys_is_an_error() -> None:
    class Mixed(Unfused):
        @property
        def group(self) -> str:
            return self.tile.name

    kernel = UNFUSED.sample
    mixed = Mixed(arch=kernel.arch, head_dim=64, tile=kernel.tile, dtype=kernel.dtype)
    spaces = dict.fromkeys(SPACES, lambda: tiles.Listing(kernels=[mixed]))
    with pytest.raises(FamilyError, match="has the name 'm64n64_s4_w4', which must begin with its arch"):
        Families(replace(UNFUSED, kernel=Mixed, spaces=spaces))


def test_a_field_that_is_not_in_names_is_an_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Hidden(Unfused):
        variant: int = 1

    with pytest.raises(TagError, match=r"Hidden\.variant has 0 tags"):
        Families(replace(UNFUSED, kernel=Hidden))


def test_a_kernel_of_an_arch_that_its_family_does_not_name_is_refused() -> None:
    class Elsewhere(Unfused):
        archs: ClassVar[tuple[Arch, ...]] = ()

    kernel = UNFUSED.sample
    with pytest.raises(ValueError, match=r"arch must be one of unfused's, not Arch\.SM89"):
        Elsewhere(arch=kernel.arch, head_dim=64, tile=kernel.tile, dtype=kernel.dtype)
    assert Elsewhere.read(kernel.name) is None


NEW_ARCH = (
    ("core/arch.py", '    SM89 = "sm89"\n', '    SM89 = "sm89"\n    SM100 = "sm100"\n'),
    ("core/arch.py", "return _LIMITS[self]\n", "return _LIMITS.get(self, _LIMITS[Arch.SM89])\n"),
)
NEW_ARCH_OF_FAMILIES = tuple(
    (f"families/{name}/config.py", "= (Arch.SM89,)", "= (Arch.SM89, Arch.SM100)")
    for name in ("fmha_fwd", "unfused")
)


@pytest.mark.parametrize("edits", [NEW_ARCH, (*NEW_ARCH, *NEW_ARCH_OF_FAMILIES)], ids=["known", "named"])
def test_an_arch_brings_no_kernel_by_itself(edits: tuple[tuple[str, str, str], ...], tmp_path: Path) -> None:
    """Not when it is known, nor when a family names it: only tables of its own do."""
    shutil.copytree(ROOT / "generator", tmp_path / "generator", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "templates").symlink_to(TEMPLATES)
    for path, before, after in edits:
        file = tmp_path / "generator" / path
        text = file.read_text(encoding="utf-8")
        assert text.count(before) == 1
        file.write_text(text.replace(before, after), encoding="utf-8")

    def generator(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "generator", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    for name in SPACES:
        listed = generator("--list", "--space", name).stdout.splitlines()
        assert listed == [kernel.name for kernel in FAMILIES.build(name).kernels]
    explained = generator("--explain", "unfused_sm100_d64_m64n64_s4_w4_f16")
    if len(edits) > len(NEW_ARCH):
        assert "legal; in the spaces: none" in explained.stdout
    else:
        assert "is not a kernel name" in explained.stderr


def test_every_arch_of_a_family_has_kernels() -> None:
    for family in FAMILIES:
        released = {
            kernel.arch for kernel in FAMILIES.build("release").kernels if kernel.family == family.name
        }
        assert released == set(family.kernel.archs)


def test_an_arch_has_headers_and_is_what_cmake_compiles_for() -> None:
    options = (ROOT / "cmake/options.cmake").read_text(encoding="utf-8")
    default = re.search(r'SDPA_CUDA_ARCHS "([^"]*)"', options)
    assert default is not None
    codes = {arch.limits.cmake_architectures for arch in Arch}
    own = {code for code in codes if re.fullmatch(r"\d+a-real", code)}  # always for that one
    assert codes - own == set(default[1].split(";"))
    for arch in Arch:
        assert (TEMPLATES / f"include/sdpa/arch/{arch.limits.instructions}.cuh").is_file()


def test_the_bits_of_what_kernels_take_only_grow() -> None:
    """They go into the C ABI: a bit never gets another meaning."""
    assert {bit.name: bit.value for bit in Takes} == {
        "FULL": 1,
        "CAUSAL": 2,
        "BOOL": 4,
        "BIAS16": 8,
        "BIAS32": 16,
        "LENGTHS": 32,
        "PACKED": 64,
        "UNDROPPED": 128,
        "DROPOUT": 256,
        "SMALLER_HEAD_DIM": 512,
        "SPLITS": 1024,
        "WINDOW": 2048,
        "SINKS": 4096,
    }
    assert max(bit.value for bit in Takes) < 2**64


def test_every_release_kernel_says_what_it_takes() -> None:
    """A problem needs one of two bits, twice; a kernel that takes neither could serve none."""
    for kernel in FAMILIES.build("release").kernels:
        if kernel.op is Op.FORWARD:
            assert kernel.takes & (Takes.FULL | Takes.CAUSAL), kernel.name
            assert kernel.takes & (Takes.UNDROPPED | Takes.DROPOUT), kernel.name
        assert kernel.op in Op
        assert all(re.fullmatch("[a-z][a-z0-9_]*", word) for word in kernel.details)
        assert all(isinstance(number, int) for number in kernel.details.values())


@pytest.mark.parametrize(
    "name",
    [
        "",
        "fmha_fwd",
        "fmha_fwd_sm89_d64_m128n64_s2_w4",  # a group
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f32",
        "fmha_fwd_sm100_d64_m128n64_s2_w4_f16",
        "fmha_bwd_sm89_d64_m128n64_s2_w4_f16",
        "fmha_fwd_sm89_d064_m128n64_s2_w4_f16",
        "fmha_fwd_sm89_d0_m128n64_s2_w4_f16",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_g1_f16",  # two names for one kernel
        "fmha_fwd_sm89_d64_m128n64_s2_w4_qreg_g2_f16",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_dropout_causal",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_general_causal",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_dropout_general",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_split_general",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_general_split_dropout",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_unbiased_general",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_causal ",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16\n",
        "fmha_fwd_sm89_d64_m128n64_s٢_w4_f16",  # a digit, but not an ASCII one
        "xfmha_fwd_sm89_d64_m128n64_s2_w4_f16",
        "fmha_fwd_sm89_d64_m99999999n64_s2_w4_f16",
    ],
)
def test_other_names_are_refused_with_the_grammar(name: str) -> None:
    with pytest.raises(InvalidNameError, match="not a kernel name; the grammar is") as error:
        FAMILIES.parse(name)
    text = str(error.value)
    assert repr(name) in text
    meant = [family for family in FAMILIES if name.startswith(f"{family.name}_")]
    for family in FAMILIES:
        assert (family.kernel.grammar() in text) == (family in meant or not meant)
    assert FAMILIES.parse(text.rpartition(" ")[2])


@pytest.mark.parametrize("family", list(FAMILIES), ids=lambda family: family.name)
def test_the_grammar_in_documents_is_that_of_the_tags(family: Family) -> None:
    tour = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert f"\n{family.kernel.grammar()}\n" in tour
    file = ROOT / f"generator/families/{family.name}/tiles.py"
    tile = type(family.sample.tile)
    assert f"names: {tile.grammar()}." in file.read_text(encoding="utf-8")
