"""The dropout mask outside the kernels: against a plain scalar version, known answers, and statistics.

Everything is seeded, so a statistical bound holds or fails for good.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from sdpa_cutlass import dropout
from sdpa_cutlass.dropout import PhiloxState, dropout_mask, dropout_threshold

STATE = PhiloxState(0x0123456789ABCDEF, 0xFEDCBA9876543210)
LARGEST = 2**64 - 1

# Philox4x32 with 7 rounds, from the known-answer file of its authors' library Random123.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(7):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            product1 >> 32 ^ c[1] ^ k[0],
            product1 % 2**32,
            product0 >> 32 ^ c[3] ^ k[1],
            product0 % 2**32,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def scalar_kept(head: int, i: int, j: int, threshold: int, state: PhiloxState) -> bool:
    """One element of the mask; `head` is batch · num_heads_q + head."""
    key = [state.seed % 2**32, state.seed >> 32 ^ state.offset >> 32]
    counter = [j // 32 * 4 + j // 2 % 4, i // 16 * 8 + i % 8, head, state.offset % 2**32]
    words = scalar_philox(counter, key)
    owned = words[j // 8 % 4] >> 8 * (2 * (i // 8 % 2) + j % 2) & 0x7F
    low_bits = 0  # of the threshold, as the fraction's bits would lie; both are read from the top
    fraction = 0
    for rank in range(16):
        byte, word = 3 - rank // 4, rank % 4
        fraction = 2 * fraction + (words[word] >> 8 * byte + 7 & 1)
        low_bits = 2 * low_bits + (threshold >> 15 - rank & 1)
    return not owned < (threshold >> 16) + (fraction < low_bits)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert tuple(scalar_philox(list(counter), list(key))) == expected
    assert dropout.philox4x32(counter, key) == expected
    arrays = dropout.philox4x32(tuple(np.full(3, c) for c in counter), key)
    assert all((words == word).all() for words, word in zip(arrays, expected, strict=True))


@pytest.mark.parametrize("p_dropout", [0.1, 0.5, 0.77, 0.999, 2.0**-23, 1 - 2.0**-23])
@pytest.mark.parametrize(
    "state", [PhiloxState(0, 0), PhiloxState(3, 1), STATE, PhiloxState(LARGEST, LARGEST)]
)
def test_arrays_equal_the_scalar_version(device: str, p_dropout: float, state: PhiloxState) -> None:
    shape = (2, 3, 37, 75)
    mask = dropout_mask(*shape, p_dropout, state)
    assert mask.shape == shape
    assert mask.dtype == np.bool_
    tensor = dropout_mask(*shape, p_dropout, state, device=device)
    assert tensor.device.type == device
    assert tensor.dtype is torch.bool
    assert np.array_equal(tensor.cpu().numpy(), mask)
    threshold = round(float(np.float32(p_dropout)) * 2**23)
    random = np.random.default_rng(0)
    for b, h, i, j in zip(*(random.integers(0, size, 250) for size in shape), strict=True):
        index = tuple(map(int, (b, h, i, j)))
        kept = scalar_kept(index[0] * 3 + index[1], index[2], index[3], threshold, state)
        assert mask[index] == kept, index


@pytest.mark.parametrize("tiles_at_once", [1, 2, 7, 40])
def test_the_work_may_be_cut_anywhere(monkeypatch: pytest.MonkeyPatch, tiles_at_once: int) -> None:
    shape = (2, 2, 70, 130)
    expected = dropout_mask(*shape, 0.3, STATE)
    monkeypatch.setattr(dropout, "_TILES_AT_ONCE", tiles_at_once)
    assert np.array_equal(dropout_mask(*shape, 0.3, STATE), expected)
    assert np.array_equal(dropout_mask(*shape, 0.3, STATE, device="cpu").numpy(), expected)


def test_an_element_does_not_depend_on_the_sizes_around_it() -> None:
    """So padded, packed and longer sequences drop alike, whatever their lengths."""
    large = dropout_mask(3, 4, 90, 200, 0.4, STATE)
    assert np.array_equal(dropout_mask(2, 4, 33, 199, 0.4, STATE), large[:2, :, :33, :199])
    assert np.array_equal(dropout_mask(1, 12, 90, 1, 0.4, STATE), large[..., :1].reshape(1, 12, 90, 1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_the_state_may_be_a_tensor(device: str, dtype: torch.dtype) -> None:
    expected = dropout_mask(1, 2, 20, 40, 0.3, STATE)
    signed = [value - 2**64 if value >= 2**63 else value for value in STATE]
    tensor = torch.tensor(signed, dtype=torch.int64).view(dtype).to(device)
    for where in (None, "cpu", device):
        mask = torch.as_tensor(dropout_mask(1, 2, 20, 40, 0.3, tensor, device=where))
        assert np.array_equal(mask.cpu().numpy(), expected)


@pytest.mark.parametrize(
    ("p_dropout", "threshold"),
    [
        (0, 0),
        (0.5, 2**22),
        (0.1, 838861),  # float32's 0.1 is 13421773 / 2^27
        (2.0**-24, 0),  # ties go to the even neighbour
        (3 * 2.0**-24, 2),
        (1 - 2.0**-24, 2**23 - 1),
        (1, 2**23 - 1),
    ],
)
def test_the_threshold_has_23_bits(p_dropout: float, threshold: int) -> None:
    assert dropout_threshold(p_dropout) == threshold


def test_the_spread_bits_keep_their_order() -> None:
    """Comparing a fraction with spread bits is comparing 16-bit numbers: so t / 2^23 is exact."""
    spread = [dropout.spread(value) for value in range(0, 2**16, 5)]
    assert spread == sorted(set(spread))
    assert dropout.spread(2**16 - 1) == 0xF0F0F0F0
    words = tuple(np.array([word]) for word in (0x80FFFF7F, 0x7F7F7F7F, 0xFF7F7F7F, 0x7F7F7FFF))
    assert int(dropout._fraction(words)[0]) == dropout.spread(0b1010_1000_1000_0001)


@pytest.mark.parametrize("p_dropout", [0.0, 2.0**-25])
def test_nothing_is_dropped_at_0(p_dropout: float) -> None:
    assert dropout_mask(1, 2, 64, 64, p_dropout, STATE).all()
    assert dropout_mask(1, 2, 64, 64, p_dropout, STATE, device="cpu").all()


@pytest.mark.parametrize("p_dropout", [1, 1.0, 1 - 1e-9])
def test_everything_is_dropped_at_1(p_dropout: float) -> None:
    assert not dropout_mask(1, 2, 64, 64, p_dropout, STATE).any()
    assert not dropout_mask(1, 2, 64, 64, p_dropout, STATE, device="cpu").any()


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)])
def test_sizes_may_be_zero(shape: tuple[int, int, int, int]) -> None:
    assert dropout_mask(*shape, 0.5, STATE).shape == shape
    assert dropout_mask(*shape, 0.5, STATE, device="cpu").shape == shape


@pytest.mark.parametrize(
    "p_dropout", [1e-5, 1e-4, 1 / 512, 0.01, 0.1, 0.2, 0.3, 1 / 3, 0.5, 0.7, 0.9, 0.95, 0.999, 1 - 1e-5]
)
def test_rate(p_dropout: float) -> None:
    """Dropped elements are as many as of a binomial distribution, within 4 standard deviations."""
    mask = dropout_mask(2, 2, 1024, 1024, p_dropout, STATE)
    dropped = mask.size - int(mask.sum())
    probability = dropout_threshold(p_dropout) / 2**23
    deviation = (mask.size * probability * (1 - probability)) ** 0.5
    assert abs(dropped - mask.size * probability) < 4 * deviation


def correlation(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.corrcoef(left.ravel().astype(float), right.ravel().astype(float))[0, 1])


NEIGHBOURS = {
    "rows": (0, 0, 1, 0),
    "columns": (0, 0, 0, 1),
    "diagonal": (0, 0, 1, 1),
    "heads": (0, 1, 0, 0),
    "batches": (1, 0, 0, 0),
    "next-tile-row": (0, 0, 16, 0),
    "next-tile-column": (0, 0, 0, 32),
    "same-block-rows": (0, 0, 8, 0),
    "same-block-words": (0, 0, 0, 8),
    "same-block-far-words": (0, 0, 0, 24),
    "same-block-corner": (0, 0, 8, 9),
}


@pytest.mark.parametrize("p_dropout", [0.1, 0.5])
@pytest.mark.parametrize("distance", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_neighbours_are_independent(distance: tuple[int, ...], p_dropout: float) -> None:
    mask = dropout_mask(2, 4, 400, 400, p_dropout, STATE)
    left = mask[tuple(slice(0, size - d) for size, d in zip(mask.shape, distance, strict=True))]
    right = mask[tuple(slice(d, None) for d in distance)]
    assert abs(correlation(left, right)) < 4 / left.size**0.5 + 2e-4  # a block shares its fraction


def test_the_16_elements_of_a_block_are_independent() -> None:
    mask = dropout_mask(1, 4, 512, 512, 0.1, STATE).reshape(-1, 2, 8, 16, 4, 4, 2)
    blocks = mask.transpose(0, 2, 3, 5, 1, 4, 6).reshape(-1, 16).astype(float)
    found = np.corrcoef(blocks, rowvar=False) - np.eye(16)
    assert np.abs(found).max() < 4.5 / len(blocks) ** 0.5 + 2e-4
    dropped = (blocks == 0).sum(1)  # as many in a block as of a binomial distribution
    expected = 16 * 0.1 * 0.9
    assert abs(dropped.var() - expected) < 0.03 * expected


@pytest.mark.parametrize(
    "other",
    [
        PhiloxState(STATE.seed + 1, STATE.offset),
        PhiloxState(STATE.seed + 2**32, STATE.offset),
        PhiloxState(STATE.seed, STATE.offset + 1),
        PhiloxState(STATE.seed, STATE.offset + 4),
        PhiloxState(STATE.seed, STATE.offset + 2**32),
    ],
    ids=["seed", "high-seed", "offset", "next-offset", "high-offset"],
)
def test_states_are_independent(other: PhiloxState) -> None:
    masks = [dropout_mask(1, 2, 700, 700, 0.3, state) for state in (STATE, other)]
    assert abs(correlation(*masks)) < 4 / masks[0].size ** 0.5


def test_bytes_are_uniform() -> None:
    """Chi-square of each of the 16 bytes over 2^17 counters: 255 degrees of freedom, 4.5 deviations."""
    counters = (np.arange(2**9)[:, None], np.arange(2**8), 5, 17)
    words = dropout.philox4x32(counters, (1, 2))
    for word in words:
        for byte in range(4):
            counts = np.bincount((word >> 8 * byte & 0xFF).ravel(), minlength=256)
            expected = counts.sum() / 256
            chi_square = ((counts - expected) ** 2 / expected).sum()
            assert abs(chi_square - 255) < 4.5 * (2 * 255) ** 0.5


REFUSED = [
    ({"batch": -1}, ValueError, "batch=-1"),
    ({"seqlen_k": 2.0}, TypeError, "seqlen_k=2.0"),
    ({"seqlen_q": True}, TypeError, "seqlen_q=True"),
    ({"p_dropout": -0.1}, ValueError, "p_dropout=-0.1"),
    ({"p_dropout": 1.1}, ValueError, "p_dropout=1.1"),
    ({"p_dropout": float("nan")}, ValueError, "p_dropout=nan"),
    ({"p_dropout": "0.1"}, TypeError, "p_dropout='0.1'"),
    ({"philox": 5}, TypeError, "philox=5"),
    ({"philox": (1, 2, 3)}, TypeError, "philox="),
    ({"philox": (1, 2.0)}, TypeError, "offset 2.0"),
    ({"philox": (-1, 2)}, ValueError, "seed -1"),
    ({"philox": (1, 2**64)}, ValueError, f"offset {2**64}"),
    ({"philox": torch.zeros(3, dtype=torch.int64)}, TypeError, r"shape \(3,\)"),
    ({"philox": torch.zeros(2)}, TypeError, "float32"),
]


@pytest.mark.parametrize("where", [None, "cpu"], ids=["numpy", "torch"])
@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_refused(where: str | None, change: dict, error: type[Exception], message: str) -> None:
    sizes = {"batch": 1, "num_heads_q": 1, "seqlen_q": 2, "seqlen_k": 2}
    arguments = {**sizes, "p_dropout": 0.5, "philox": STATE, **change}
    with pytest.raises(error, match=message):
        dropout_mask(**arguments, device=where)


def test_importing_needs_neither_numpy_nor_torch() -> None:
    code = "import sys; sys.modules['numpy'] = sys.modules['torch'] = None; import sdpa_cutlass.dropout"
    subprocess.run([sys.executable, "-c", code], check=True)
