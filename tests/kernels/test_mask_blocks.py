"""What Hopper's kernels find of a boolean mask ahead: words of bits, on which no result depends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sdpa_cutlass.dropout import PhiloxState
from sdpa_cutlass.problem import Causal
from tests.kernels.general import (
    WORKSPACE_ALIGNMENT,
    Case,
    Lengths,
    launch,
    make_case_params,
    random_qkv,
    random_sinks,
)
from tests.kernels.general_numerics import check_case
from tests.kernels.harness import TestedKernel

ROWS_OF_A_CONSUMER = 64
BLOCKS_OF_A_GROUP = 32
# (rows, keys): five blocks; and more than a group of them, the last one short
SIZES = ((165, 640), (70, 4400))


def documents(rows: int, keys: int) -> torch.Tensor:
    """[rows, keys]: a row sees the keys of its own document, of five."""
    of_row = torch.arange(rows) * 5 // rows
    return of_row[:, None] == (torch.arange(keys) * 5 // keys)[None]


def holes(rows: int, keys: int) -> torch.Tensor:
    """[rows, keys]: of every 32 rows and 128 keys a third is seen."""
    seen = torch.rand(-(-rows // 32), -(-keys // 128), generator=torch.Generator().manual_seed(0)) < 1 / 3
    return seen.repeat_interleave(32, 0).repeat_interleave(128, 1)[:rows, :keys]


def structured_masks(rows: int, keys: int) -> dict[str, torch.Tensor]:
    """By name, for two batches: each [1 or 2, 1, 1 or rows, keys]."""
    padding = torch.arange(keys) < torch.tensor([keys // 3, keys])[:, None, None, None]
    return {
        "documents": documents(rows, keys)[None, None],
        "padding": padding,
        "padding, every row": padding.expand(2, 1, rows, keys).contiguous(),
        "holes": torch.stack([holes(rows, keys), holes(rows, keys).flip(1)])[:, None],
        "noise": torch.rand(1, 1, rows, keys, generator=torch.Generator().manual_seed(0)) < 0.5,
        "nothing": torch.zeros(1, 1, rows, keys, dtype=torch.bool),
        "everything": torch.ones(1, 1, rows, keys, dtype=torch.bool),
    }


def run_with(kernel: TestedKernel, case: Case, workspace_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, the workspace's bytes); without a workspace nothing is known of the mask."""
    out = torch.empty_like(case.q)
    params, held = make_case_params(case, out, None)
    room = torch.zeros(workspace_bytes + WORKSPACE_ALIGNMENT, dtype=torch.uint8, device=kernel.device)
    skipped = -room.data_ptr() % WORKSPACE_ALIGNMENT
    if workspace_bytes:
        params.workspace, params.workspace_bytes = room.data_ptr() + skipped, workspace_bytes
    launch(kernel, params, held, gives_room=False)
    return out, room.cpu()[skipped : skipped + workspace_bytes]


def make_case(kernel: TestedKernel, rows: int, keys: int) -> Case:
    """Without a mask."""
    p_dropout = 0.2 if kernel.info.has_dropout else 0.0
    return Case(**random_qkv(kernel, rows, keys), p_dropout=p_dropout, philox=PhiloxState(3, 4))


def room_for(kernel: TestedKernel, case: Case) -> int:
    params, _held = make_case_params(case, torch.empty_like(case.q), None)
    return kernel.library.workspace_bytes(kernel.info.index, params)


def expected_words(mask: torch.Tensor, kernel: TestedKernel, rows: int) -> torch.Tensor:
    """int64 [masks, tiles of rows, groups of blocks, 4] of a mask [masks, 1, rows, keys]."""
    mask = mask.expand(-1, -1, rows, -1)[:, 0]
    step, size = kernel.info.block_m, kernel.info.block_n
    blocks = -(-mask.shape[2] // size)
    words = torch.zeros(len(mask), -(-rows // step), -(-blocks // BLOCKS_OF_A_GROUP), 4, dtype=torch.int64)
    for b, page in enumerate(mask):
        for consumer_rows in range(-(-rows // ROWS_OF_A_CONSUMER)):
            first = consumer_rows * ROWS_OF_A_CONSUMER
            tile, consumer = divmod(consumer_rows, step // ROWS_OF_A_CONSUMER)
            for block in range(blocks):
                part = page[first : first + ROWS_OF_A_CONSUMER, block * size : (block + 1) * size]
                group, bit = divmod(block, BLOCKS_OF_A_GROUP)
                words[b, tile, group, consumer] |= int(part.any()) << bit
                words[b, tile, group, 2 + consumer] |= int(part.all()) << bit
    return words


@pytest.mark.parametrize("sizes", SIZES)
def test_words(listing_kernel: TestedKernel, sizes: tuple[int, int]) -> None:
    base = make_case(listing_kernel, *sizes)
    for name, mask in structured_masks(*sizes).items():
        case = replace(base, mask=mask.to(listing_kernel.device))
        _, room = run_with(listing_kernel, case, room_for(listing_kernel, case))
        wanted = expected_words(mask, listing_kernel, sizes[0])
        words = room.view(torch.int32).long() & 0xFFFFFFFF
        assert torch.equal(words.view(wanted.shape), wanted), name


@pytest.mark.parametrize(("sizes", "names"), [(SIZES[0], None), (SIZES[1], ("holes",))])
def test_results_do_not_depend_on_them(
    listing_kernel: TestedKernel, sizes: tuple[int, int], names: tuple[str, ...] | None
) -> None:
    """Right with a workspace, and the same bits without one."""
    rows, keys = sizes
    base = make_case(listing_kernel, rows, keys)
    growth = torch.linspace(4, 0.5, keys)[:, None]  # what is visited later has larger scores
    base.k.mul_(growth.to(base.k.device))
    masks = structured_masks(rows, keys)
    for i, name in enumerate(names or masks):
        masked = replace(base, mask=masks[name].to(listing_kernel.device))
        cases = (
            replace(masked, causal=(None, *Causal)[i % 3]),
            replace(masked, causal=Causal.BOTTOM_RIGHT, window=(keys // 2, 0)),
            replace(
                masked,
                lengths_q=Lengths(seqlens=(rows - 9, rows)),
                lengths_k=Lengths(seqlens=(keys, keys - 200)),
                sinks=random_sinks(listing_kernel, 2, torch.float32),
            ),
        )
        for case in cases if names else cases[i % 2 :: 2]:
            out, _ = check_case(listing_kernel, case)
            assert room_for(listing_kernel, case) > 0
            assert torch.equal(run_with(listing_kernel, case, 0)[0], out)


def test_when_nothing_is_looked_for(listing_kernel: TestedKernel) -> None:
    """Masks of a head's own, of few keys, and those that cannot be read 16 bytes at a time."""
    rows, keys = SIZES[0]
    base = make_case(listing_kernel, rows, keys)
    everything = torch.ones(2, 2, rows, keys + 16, dtype=torch.bool, device=listing_kernel.device)
    shared = everything[:, :1, :, :keys]
    for mask in (
        everything[..., :keys],  # of each head
        shared.transpose(2, 3).contiguous().transpose(2, 3),
        torch.ones(2, 1, rows, keys + 1, dtype=torch.bool, device=listing_kernel.device)[..., :keys],
    ):
        assert room_for(listing_kernel, replace(base, mask=mask)) == 0
    few = keys // 2
    short = replace(base, k=base.k[:, :, :few], v=base.v[:, :, :few], mask=shared[..., :few])
    assert room_for(listing_kernel, short) == 0
    assert room_for(listing_kernel, replace(base, mask=shared)) > 0
