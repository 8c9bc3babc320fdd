"""The result format: what is written can be read again, all else is refused, no file is half written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sdpa_cutlass.cli import results
from sdpa_cutlass.cli.results import ResultFormatError
from tests.cli import rows as made

KEYS = [
    "suite", "batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim", "dtype", "causal",
    "alignment", "mask", "p_dropout", "visible", "provider", "kernel", "gpu_us", "gpu_us_spread", "wall_us",
    "wall_us_spread", "loop_us", "floor_us", "input_sets", "tflops", "max_err_out", "max_err_lse",
    "bound_out", "status",
]  # fmt: skip


def test_keys_are_the_published_ones() -> None:
    document = json.loads(results.to_json(made.results()))
    assert list(document) == ["format", "env", "rows"]
    assert document["format"] == 4
    assert [list(row) for row in document["rows"]] == [KEYS] * 6


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    written = made.results()
    results.save(written, path)
    assert results.load(path) == written
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


def test_errors_that_are_not_numbers_survive() -> None:
    written = made.results([made.row(max_err_out=math.nan, max_err_lse=math.inf, status="wrong: NaN")])
    read = results.from_json(results.to_json(written)).rows[0]
    assert math.isnan(read.max_err_out or 0)
    assert read.max_err_lse == math.inf


def older(*keys: str) -> dict[str, Any]:
    """A document without some keys and without a format."""
    document = json.loads(results.to_json(made.results()))
    del document["format"]
    for row in document["rows"]:
        for key in keys:
            del row[key]
    return document


SINCE_4 = ("bound_out",)
SINCE_3 = ("alignment", "wall_us_spread", "loop_us", "floor_us", "input_sets", *SINCE_4)


def test_files_of_format_1_are_read() -> None:
    document = older("visible", *SINCE_3)
    for text in (json.dumps(document), json.dumps({"format": 1, **document})):
        assert results.from_json(text) == made.results()


def test_files_of_format_3_are_read() -> None:
    document = older(*SINCE_4)
    assert results.from_json(json.dumps({"format": 3, **document})) == made.results()
    with pytest.raises(ResultFormatError, match=r"row 0: missing keys \['bound_out'\]"):
        results.from_json(json.dumps({"format": 4, **document}))


def test_files_of_format_2_are_read() -> None:
    document = older(*SINCE_3)
    assert results.from_json(json.dumps({"format": 2, **document})) == made.results()
    for row in document["rows"]:
        del row["visible"]
    with pytest.raises(ResultFormatError, match=r"row 0: missing keys \['visible'\]"):
        results.from_json(json.dumps({"format": 2, **document}))


@pytest.mark.parametrize("name", [*results.PEERS, *results.WALL_PROVIDERS])
def test_other_libraries_and_ways_to_call_are_providers(name: str) -> None:
    assert results.from_json(broken(provider=name)).rows[2].provider == name


def test_no_rows() -> None:
    assert results.from_json(results.to_json(made.results([]))).rows == []


def broken(**changes: Any) -> str:
    document = json.loads(results.to_json(made.results()))
    for key, value in changes.items():
        if value is KEYS:
            del document["rows"][2][key]
        else:
            document["rows"][2][key] = value
    return json.dumps(document)


REFUSED = {
    "not JSON": ("{", "f: not JSON"),
    "deep": ("[" * 200_000, "f: not JSON"),
    "a number of many digits": ('{"env": {"a": 1' + "0" * 5000 + '}, "rows": []}', "f: not JSON"),
    "a list": ("[]", "exactly the keys"),
    "a key too many": ('{"env": {}, "rows": [], "more": 1}', "exactly the keys"),
    "a format to come": ('{"format": 5, "env": {}, "rows": []}', "format 5 is not among 1 to 4"),
    "a format that is none": ('{"format": true, "env": {}, "rows": []}', "format True is not among"),
    "env": ('{"env": [], "rows": []}', "env must be an object"),
    "rows": ('{"env": {}, "rows": {}}', "rows must be a list"),
    "row": ('{"env": {}, "rows": [1]}', "row 0: must be an object"),
    "key missing": (broken(status=KEYS), r"row 2: missing keys \['status'\]"),
    "key unknown": (broken(speed=1), r"row 2: .*unknown keys \['speed'\]"),
    "text for a number": (broken(batch="1"), "row 2: batch: '1' is not int"),
    "bool for a number": (broken(batch=True), "row 2: batch: True is not int"),
    "number for a bool": (broken(causal=1), "row 2: causal: 1 is not bool"),
    "null for a number": (broken(head_dim=None), "row 2: head_dim: None is not int"),
    "text for a time": (broken(gpu_us="fast"), "row 2: gpu_us: 'fast' is not float or null"),
    "visible missing": (broken(visible=KEYS), r"row 2: missing keys \['visible'\]"),
    "alignment missing": (broken(alignment=KEYS), r"row 2: missing keys \['alignment'\]"),
    "a whole number for a share": (broken(input_sets=1.5), "row 2: input_sets: 1.5 is not int or null"),
    "provider": (broken(provider="me"), "row 2: provider 'me' is none of fused, plain, piped"),
    "status": (broken(status=""), "row 2: status is empty"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ResultFormatError, match=message):
        results.from_json(text, origin="f")


def test_whole_numbers_are_fine_as_times() -> None:
    assert results.from_json(broken(gpu_us=10)).rows[2].gpu_us == 10.0


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    results.write_atomically(path, "old")

    def fail(source: object, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        results.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_csv() -> None:
    lines = results.to_csv(made.mission()).splitlines()
    assert lines[0] == ",".join(KEYS)
    problem = "mission,1,8,8,512,512,64,f16,False,top_left,none,0.0,1.0"
    assert lines[5] == f"{problem},torch_efficient,,,,,,,,,,,,,refused: too small"
    assert len(lines) == 7
