"""The format of tuned tables, what of it is refused, and the buckets that problems fall into."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpa_cutlass import Causal, DType, MaskType, kernels
from sdpa_cutlass.choice.tuned_lookup import read
from sdpa_cutlass.choice.tuned_table import (
    ENOUGH_KEYS,
    ENOUGH_ROWS,
    KINDS,
    MAX_DISTANCE,
    Bucket,
    Nearest,
    TunedTableError,
    bucket_of,
    from_json,
    misfit,
    to_json,
)
from sdpa_cutlass.library.device import HOST
from sdpa_cutlass.library.locate import Target
from tests.library.tuned_tables import PROBLEM, bucket, document, edited, head_dims, row, table


def test_tables_survive_a_round_trip() -> None:
    original = table(
        row(), row(dataclasses.replace(PROBLEM, seqlen_q=64), runner_up="other_kernel", runner_up_ns=6144)
    )
    assert from_json(to_json(original)) == original
    assert original.rows[0].ratio is None
    assert original.rows[1].ratio == pytest.approx(1.2)
    lines = to_json(original).splitlines()
    assert sum("gpu_ns" in line for line in lines) == 2  # one row a line


def test_the_number_of_splits_that_older_versions_wrote_is_passed_over() -> None:
    text = to_json(table())
    assert "num_splits" not in text
    assert to_json(from_json(edited(num_splits=1))) == text


BAD = {
    "not JSON": ("{", "not JSON"),
    "deep": ("[" * 100_000, "not JSON"),
    "a list": ("[]", "not an object"),
    "NaN": (lambda: edited(gpu_ns=float("nan")), "NaN is no number"),
    "a key twice": ('{"format": 1, "format": 1}', "a key twice"),
    "version": (lambda: json.dumps(document(format=2)), "format is 2; this version reads 1"),
    "version as text": (lambda: json.dumps(document(format="1")), "format is '1'"),
    "unknown key": (lambda: json.dumps(document(comment="hello")), "unknown key 'comment'"),
    "missing key": (lambda: json.dumps({k: v for k, v in document().items() if k != "sms"}), "no sms"),
    "no rows": (lambda: json.dumps(document(rows=[])), "rows is not a list of 1 to"),
    "row of text": (lambda: json.dumps(document(rows=["x"])), "row 0 is not an object"),
    "gpu": (lambda: json.dumps(document(gpu="../../etc")), "gpu is '../../etc'"),
    "digest": (lambda: json.dumps(document(digest="xyz")), "digest is 'xyz'"),
    "date": (lambda: json.dumps(document(date="yesterday")), "date is 'yesterday'"),
    "sms": (lambda: json.dumps(document(sms=True)), "sms is True"),
    "capability": (lambda: json.dumps(document(compute_capability=[9])), "not two integers"),
    "capability of text": (lambda: json.dumps(document(compute_capability=["9", 0])), "is '9', not"),
    "time": (lambda: edited(gpu_ns=0), "row 0: gpu_ns is 0, not an integer from 1"),
    "fractional time": (lambda: edited(gpu_ns=5.5), "gpu_ns is 5.5"),
    "kernel": (lambda: edited(kernel="rm -rf"), "kernel is 'rm -rf'"),
    "kernel of another type": (lambda: edited(kernel=7), "kernel is 7"),
    "long kernel": (lambda: edited(kernel="f" * 121), "kernel is "),
    "failed check": (lambda: edited(check="wrong: max error"), "check is 'wrong: max error', not 'ok'"),
    "dtype": (lambda: edited(dtype="f32"), "dtype is 'f32'"),
    "kind": (lambda: edited(kind="lengths+bool"), "kind is 'lengths+bool'"),
    "causal": (lambda: edited(causal=1), "causal is 1"),
    "rows number": (lambda: edited(rows=2**50), f"rows is {2**50}"),
    "huge number": ('{"format": 1' + "0" * 5000 + "}", "not JSON"),
    "no splits": (lambda: edited(num_splits=0), "row 0: num_splits is 0; a row names no number"),
    "several splits": (lambda: edited(num_splits=4), "row 0: num_splits is 4"),
    "splits of another type": (lambda: edited(num_splits=True), "row 0: num_splits is True"),
    "runner-up": (lambda: edited(runner_up="B", runner_up_ns=1), "runner_up is 'B'"),
    "runner-up without time": (lambda: edited(runner_up="b"), "runner_up_ns is 0"),
    "same bucket": (lambda: json.dumps(document(rows=document()["rows"] * 2)), "for the same bucket"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_malformed_tables_are_refused(name: str) -> None:
    made, message = BAD[name]
    with pytest.raises(TunedTableError) as caught:
        from_json(made if isinstance(made, str) else made())
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600


FLOATS = st.floats(allow_subnormal=False)  # code that torch 2.4 compiles ends them for the whole process
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=20) | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_whatever_is_changed_a_table_is_valid_or_refused(data: st.DataObject) -> None:
    found = document()
    for _ in range(data.draw(st.integers(1, 3))):
        target = data.draw(st.sampled_from([found, found["rows"][0]])) if found.get("rows") else found
        if not isinstance(target, dict):
            break
        key = data.draw(st.sampled_from([*target, "more"]))
        target[key] = data.draw(JSON)
        if not isinstance(found["rows"], list) or not found["rows"]:
            break
    try:
        parsed = from_json(json.dumps(found))
    except TunedTableError:
        return
    assert from_json(to_json(parsed)) == parsed
    misfit(parsed, kernels(Target.HOST), HOST)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=200))
def test_bytes_that_are_no_table_are_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.json"
    path.write_bytes(content)
    with pytest.raises(TunedTableError):
        read(path)


# ---- buckets ----


def test_buckets_follow_what_decides_between_kernels() -> None:
    assert bucket() == Bucket(
        dtype=DType.F16, head_dim=64, kind="plain", causal=False, gqa=1, rows=256, seqlen_q=128, seqlen_k=128
    )
    grouped = bucket(dataclasses.replace(PROBLEM, num_heads_q=8, causal=Causal.BOTTOM_RIGHT))
    assert (grouped.gqa, grouped.rows, grouped.causal) == (4, 1024, True)
    own = bucket(dataclasses.replace(PROBLEM, head_dim=72, head_dim_v=72))
    assert (own.head_dim, own.kind) == (80, "lengths")  # what serves it takes lengths too
    wider = bucket(dataclasses.replace(PROBLEM, head_dim_v=128))
    assert (wider.head_dim, wider.kind) == (128, "lengths")
    everything = dataclasses.replace(PROBLEM, mask=MaskType.BF16, has_dropout=True, has_lengths=True)
    assert bucket(everything).kind == "bias16+dropout+lengths"
    assert bucket_of(dataclasses.replace(PROBLEM, head_dim=512, head_dim_v=512), head_dims()) is None
    assert len(set(KINDS)) == 16


@pytest.mark.parametrize("mask", [None, *MaskType])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
def test_every_kind_is_known(mask: MaskType | None, dropout: bool, lengths: bool) -> None:
    problem = dataclasses.replace(PROBLEM, mask=mask, has_dropout=dropout, has_lengths=lengths)
    assert bucket(problem).kind in KINDS


def test_the_nearest_row_counts_and_none_that_is_far() -> None:
    base = row()
    far = row(bucket=dataclasses.replace(base.bucket, rows=4 * base.bucket.rows), gpu_ns=9)
    nearest = Nearest(table(base, far))
    assert nearest(base.bucket) == (base, 0.0)
    found = nearest(dataclasses.replace(base.bucket, rows=2 * base.bucket.rows + 1))
    assert found is not None
    assert found[0] is far
    assert 0.9 < found[1] < 1
    limit = int(base.bucket.seqlen_k * 2**MAX_DISTANCE)
    assert nearest(dataclasses.replace(base.bucket, seqlen_k=limit)) is not None
    assert nearest(dataclasses.replace(base.bucket, seqlen_k=limit + 2)) is None
    assert nearest(dataclasses.replace(base.bucket, gqa=8)) is not None
    for change in ({"causal": True}, {"dtype": DType.BF16}, {"head_dim": 80}, {"kind": "bool"}):
        assert nearest(dataclasses.replace(base.bucket, **change)) is None


def test_beyond_a_full_gpu_and_a_long_loop_size_changes_nothing() -> None:
    full = dataclasses.replace(bucket(), rows=ENOUGH_ROWS, seqlen_q=ENOUGH_KEYS, seqlen_k=ENOUGH_KEYS)
    more = dataclasses.replace(
        full, rows=64 * ENOUGH_ROWS, seqlen_q=4 * ENOUGH_KEYS, seqlen_k=4 * ENOUGH_KEYS
    )
    assert Nearest(table(row(bucket=full)))(more) == (row(bucket=full), 0.0)
