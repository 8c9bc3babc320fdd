"""What follows from a sweep's journals: the smallest set of tiles, and the quality of the cost model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tiles import choice, cover, model
from benchmarks.tiles.__main__ import main
from generator.families import FAMILIES
from generator.families.fmha_fwd.config import FmhaTile
from sdpa_cutlass import KernelInfo
from sdpa_cutlass.choice.cost import estimate
from sdpa_cutlass.cli.tuning import derive, sweep
from sdpa_cutlass.cli.tuning.journal import Journal, Measured, Writer
from sdpa_cutlass.cli.tuning.tasks import Task
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import HOST
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family, read_kernels
from tests.cli.sweeps import FakeMeasurer, fresh_journal, host_tasks, swept

SETS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2), st.frozensets(st.integers(0, 9), max_size=5), max_size=9
)


def smallest_by_trying(sets: Mapping[str, frozenset[int]]) -> int:
    everything = frozenset[int]().union(*sets.values())
    for size in range(len(sets) + 1):
        for some in itertools.combinations(sets.values(), size):
            if everything == frozenset[int]().union(*some):
                return size
    raise AssertionError


@settings(max_examples=300, deadline=None)
@given(sets=SETS, seed=st.randoms())
def test_no_smaller_cover_exists_and_order_does_not_matter(
    sets: dict[str, frozenset[int]], seed: random.Random
) -> None:
    found = cover.smallest_cover(sets)
    assert frozenset[int]().union(*(sets[name] for name in found.chosen)) == frozenset[int]().union(
        *sets.values()
    )
    assert len(found.chosen) == smallest_by_trying(sets)
    assert found.is_proven
    names = list(sets)
    seed.shuffle(names)
    assert cover.smallest_cover({name: sets[name] for name in names}) == found


def test_greedy_alone_would_take_one_more() -> None:
    sets = {"greedy": {2, 3, 4, 5, 6, 7}, "left": {1, 2, 3, 4}, "right": {5, 6, 7, 8}, "far": {"x"}}
    assert cover.smallest_cover(sets) == cover.Cover(("far", "left", "right"), True)
    hasty = cover.smallest_cover(sets, node_limit=1)
    assert len(hasty.chosen) == 4
    assert not hasty.is_proven


def test_exchanges_lower_the_loss_and_keep_everything_covered() -> None:
    covers = {
        name: frozenset(items)
        for name, items in {"a": "xy", "b": "xy", "c": "z", "d": "zw", "e": "w"}.items()
    }
    price = {"a": 3, "b": 1, "c": 1, "d": 5, "e": 0}
    found = cover.improved(("a", "d"), covers, lambda names: sum(price[name] for name in names))
    assert found == ("b", "d")  # c alone leaves w uncovered


class Priced(FakeMeasurer):
    """Times by tile; other tiles take 100 µs."""

    def __init__(self, prices: Mapping[str, Sequence[float]]) -> None:
        super().__init__()
        self.prices = prices
        self.count = 0

    def __call__(self, task: Task, kernels: Sequence[KernelInfo]) -> list[Measured]:
        self.count += 1
        found = []
        for kernel in kernels:
            price = self.prices.get(choice.tile_of(kernel).name)
            time = price[(self.count - 1) % len(price)] if price else 100.0
            found.append(Measured(kernel=kernel.name, gpu_us=time, max_err_out=1e-4))
        return found


def d64_tasks() -> list[Task]:
    return [task for task in host_tasks() if task.case.head_dim == 64][:2]  # full and causal


def d64_tiles() -> list[str]:
    """Of plain kernels that a sweep measures at both tasks."""
    native = library(Target.HOST)
    names = [
        {
            choice.tile_of(k).name
            for k in sweep.candidates(native, task, HOST)
            if k.head_dim == 64 and k.family is Family.FMHA_FWD and k.arch == 89 and not k.is_general
        }
        for task in d64_tasks()
    ]
    return sorted(set.intersection(*names))


def test_one_tile_near_both_beats_two_that_are_best_at_one(tmp_path: Path) -> None:
    a, b, c = d64_tiles()[:3]
    found = swept(tmp_path, d64_tasks(), Priced({a: (10, 12), b: (12, 10), c: (10.2, 10.29)}))
    chosen = choice.select(derive.choices([found]), found.kernels, 0.03)
    assert [tile.name for tile in chosen.tiles] == [c]
    assert chosen.is_proven
    assert chosen.losses == pytest.approx((0.02, 0.029))
    exact = choice.select(derive.choices([found]), found.kernels, 0.0)
    assert [tile.name for tile in exact.tiles] == [a, b]
    assert max(exact.losses) == 0
    assert exact.users == {exact.tiles[0]: 1, exact.tiles[1]: 1}


def test_a_tile_beyond_the_limit_does_not_serve(tmp_path: Path) -> None:
    a, b, c = d64_tiles()[:3]
    found = swept(tmp_path, d64_tasks(), Priced({a: (10, 12), b: (12, 10), c: (10.29, 10.4)}))
    chosen = choice.select(derive.choices([found]), found.kernels, 0.03)
    assert [tile.name for tile in chosen.tiles] == [a, b]


def test_among_equally_many_tiles_the_faster_ones_are_chosen(tmp_path: Path) -> None:
    a, b, c = d64_tiles()[:3]
    found = swept(tmp_path, d64_tasks(), Priced({a: (10.2, 10.2), b: (10, 10.1), c: (10.29, 10)}))
    chosen = choice.select(derive.choices([found]), found.kernels, 0.03)
    assert [tile.name for tile in chosen.tiles] == [b]


def test_names_of_tiles_are_the_generators() -> None:
    for kernel in read_kernels(library(Target.HOST)):
        config = FAMILIES.parse(kernel.name)
        tile = choice.tile_of(kernel)
        if config.family == "fmha_fwd":
            assert (tile.name, tile.unit, tile.head_dim) == (config.tile.name, config.group, config.head_dim)


def test_the_choice_is_printed_with_its_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = swept(tmp_path, host_tasks("host", "host_masks"))
    units = {choice.tile_of(kernel).unit for kernel in found.kernels.values()}
    resources = tmp_path / "resource_usage.json"
    entries = [
        {"unit": u, "seconds": 50.0, "object_bytes": 2**20, "kernels": [{}, {}]} for u in sorted(units)
    ]
    resources.write_text(json.dumps({"units": entries[1:]}))
    arguments = ["choose", str(tmp_path / "journal.jsonl"), "--resources", str(resources)]
    assert main([*arguments, "--within", "5%"]) == 0
    output = capsys.readouterr().out
    total = len({choice.tile_of(kernel).key for kernel in found.kernels.values()})
    assert f" of {total} tiles stay within 5.0% of the best kernel" in output
    assert "(proven smallest)" in output
    assert "loss against the best kernel: " in output
    line = next(line for line in output.splitlines() if line.startswith("  all measured: "))
    count = len(units)
    assert f"{count} units; 1 of them not in the build's record, {2 * (count - 1)} kernels" in line
    assert f"{50 * (count - 1)} s of compiling, {count - 1:.1f} MiB" in line
    tables = [line for line in output.splitlines() if ": tiles(" in line]
    chosen = choice.select(derive.choices([found]), found.kernels, 0.05).tiles
    assert len(tables) == len({(tile.table, tile.head_dim) for tile in chosen})
    for line in tables:  # as generator/families/fmha_fwd/tiles.py reads it
        for name in line.split("(")[1].split(")")[0].split(", "):
            assert FmhaTile.parse(json.loads(name)).name == json.loads(name)
    assert main([*arguments, "--within", "5"]) == 0
    assert capsys.readouterr().out == output


def test_parts_of_a_sweep_in_several_journals_are_one(tmp_path: Path) -> None:
    """Libraries of parts of the space: the same problems, other kernels."""
    native, tasks, journals = library(Target.HOST), d64_tasks(), []
    for number, glob in enumerate(("*_m128n*", "*_m16n*", "*_m[36]*", "*")):
        writer = Writer(tmp_path / f"{number}", fresh_journal(), is_new=True)
        sweep.run(
            tasks,
            candidates_of=functools.partial(
                sweep.candidates, native, device=HOST, glob=glob, everything=True
            ),
            measure=FakeMeasurer(),
            writer=writer,
        )
        writer.close()
        journals.append(writer.journal)
    whole = derive.choices(journals[3:])
    assert derive.choices(journals[:3]) == whole
    assert len(whole[0].times) > len(derive.choices(journals[:1])[0].times)


def test_journals_of_different_gpus_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept(tmp_path, d64_tasks())
    device = dataclasses.replace(HOST, sms=60)
    Writer(tmp_path / "other", fresh_journal(device=device), is_new=True).close()
    for command in ("choose", "model"):
        assert main([command, str(tmp_path / "journal.jsonl"), str(tmp_path / "other")]) == 2
        assert "one is of host (modelled as NVIDIA L4) with 58 SMs" in capsys.readouterr().err
        assert main([command, str(tmp_path / "nothing")]) == 2
        assert main([command, str(tmp_path / "other")]) == 2
        assert "no measurement of a right kernel" in capsys.readouterr().err


# ---- the cost model ----


@pytest.mark.parametrize(
    ("xs", "ys", "rho"),
    [
        ([1, 2, 3], [10, 20, 90], 1.0),
        ([1, 2, 3], [9, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 1, 2, 2], 2 / 5**0.5),
        ([106, 100, 86, 101, 99, 103, 97, 113, 112, 110], [7, 27, 2, 50, 28, 29, 20, 12, 6, 17], -29 / 165),
        ([1, 2, 3], [5, 5, 5], None),
    ],
)
def test_rank_correlation(xs: list[float], ys: list[float], rho: float | None) -> None:
    assert model.spearman(xs, ys) == (None if rho is None else pytest.approx(rho))
    assert model.spearman(ys, xs) == (None if rho is None else pytest.approx(rho))


class Predicted(FakeMeasurer):
    """Times that the cost model predicts, times a factor; `spoiled` kernels take three times as long."""

    def __init__(self, factor: float, spoiled: str = "") -> None:
        super().__init__()
        self.factor, self.spoiled = factor, spoiled

    def __call__(self, task: Task, kernels: Sequence[KernelInfo]) -> list[Measured]:
        return [
            Measured(
                kernel=kernel.name,
                gpu_us=estimate(kernel, task.problem, HOST).microseconds
                * self.factor
                * (3 if self.spoiled and self.spoiled in kernel.name else 1),
                max_err_out=0.0,
            )
            for kernel in kernels
        ]


def judged(found: Journal) -> model.Quality:
    return model.quality("all", derive.choices([found]), found.kernels, found.device)


def test_a_perfect_model_has_no_regret(tmp_path: Path) -> None:
    quality = judged(swept(tmp_path, host_tasks(), Predicted(1.25)))
    assert quality.mean_regret == quality.worst_regret == pytest.approx(1)
    assert quality.hits == quality.buckets == len(host_tasks())
    assert (quality.mean_rho, quality.least_rho) == pytest.approx((1, 1))
    assert quality.scale == pytest.approx(0.8)


def test_what_the_model_gets_wrong_is_its_regret(tmp_path: Path) -> None:
    task = d64_tasks()[0]
    best, second = sweep.candidates(library(Target.HOST), task, HOST)[:2]
    quality = judged(swept(tmp_path, [task], Predicted(1.0, choice.tile_of(best).name + "_")))
    first, then = (estimate(kernel, task.problem, HOST).microseconds for kernel in (best, second))
    assert (quality.worst_regret, quality.mean_regret) == pytest.approx((3 * first / then,) * 2)
    assert (quality.hits, quality.buckets) == (0, 1)
    assert quality.mean_rho is not None
    assert quality.mean_rho < 0.5
    assert quality.worst == str(task.bucket)


def test_the_models_quality_is_printed_by_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = swept(tmp_path, host_tasks("host", "host_masks"))
    assert main(["model", str(tmp_path / "journal.jsonl")]) == 0
    output = capsys.readouterr().out
    assert "host (modelled as NVIDIA L4), 58 SMs, 2026-11-21" in output
    for group in ("all", "head_dim  64", "plain, causal", "dropout", "regret, mean"):
        assert group in output
    rows = model.by_groups(derive.choices([found]), found.kernels, found.device)
    by_name: dict[str, Any] = {row.what: row for row in rows}
    assert by_name["all"].buckets == sum(row.buckets for row in rows if row.what.startswith("head_dim"))
    assert by_name["all"].worst_regret == max(row.worst_regret for row in rows)


def test_predictions_are_made_by_the_model_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the library: a journal is enough to fit constants to."""
    found = swept(tmp_path, d64_tasks(), Predicted(1.0))
    before = judged(found).scale
    monkeypatch.setattr("sdpa_cutlass.choice.cost.fmha_fwd.LAUNCH_CYCLES", 15000)
    assert judged(found).scale > 1.2 * before
