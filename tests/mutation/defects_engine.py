"""Defects of the checks themselves: the host engine's rules, its shadow of shared memory, its counts."""

from __future__ import annotations

from tests.mutation.model import Check, Kernels, Mutant

_BLOCK = "arch/simt/block.hpp"
_MEETINGS = "arch/simt/block_meetings.hpp"
_ASYNC = "arch/simt/async_rules.hpp"
_SHADOW = "arch/simt/shadow.hpp"
_ARRIVALS = "arch/simt/arrivals.hpp"
_BANKS = "arch/simt/bank_conflicts.hpp"
_COLLECTIVES = "arch/simt/collectives.hpp"
_COPIES = "arch/simt/cp_async.hpp"


def _engine(name: str, header: str, old: str, new: str, defect: str, *, observed: bool = False) -> Mutant:
    return Mutant(
        name=name,
        header=header,
        old=old,
        new=new,
        defect=defect,
        kernels=Kernels.ENGINE,
        by=Check.ENGINE,
        observed=observed,
    )


ENGINE: tuple[Mutant, ...] = (
    # ---- races ----
    _engine(
        "shadow_ignores_reads",
        _SHADOW,
        "if (!is_ordered(read, warp, thread, false)) return {true, false, grain * kGrainBytes, read};",
        "",
        "writes over what others still read are not found",
    ),
    _engine(
        "shadow_ignores_writes_before_reads",
        _SHADOW,
        "} else if (write.is_pending || !is_ordered(write, warp, thread, is_by_warp)) {",
        "} else if (write.is_pending) {",
        "reads of what others have just written are not found",
    ),
    _engine(
        "shadow_ignores_writes_before_writes",
        _SHADOW,
        "if (write.is_pending || !is_ordered(write, warp, thread, false)) {",
        "if (write.is_pending) {",
        "two writes without a barrier are not found",
    ),
    _engine(
        "shadow_forgets_copies_in_flight",
        _SHADOW,
        "write = {kind, kind == AccessKind::kCpAsync, false,",
        "write = {kind, false, false,",
        "reads of a cp.async that nobody waited for are not found",
    ),
    _engine(
        "shadow_dates_copies_at_their_issue",
        _SHADOW,
        "      writes_[grain].epoch = epochs_[size_t(thread) / 32];\n",
        "",
        "a barrier between a cp.async and its wait counts",
    ),
    _engine(
        "shadow_joins_nothing",
        _SHADOW,
        "for_each_bit(warps, [&](size_t w) { known_[w] = joined; });",
        "",
        "barriers order nothing: races are reported where there are none",
    ),
    _engine(
        "shadow_orders_all_warps",
        _MEETINGS,
        "shadow_.sync_warps(arrived | release_waiting(barrier));\n}\n",
        "release_waiting(barrier);\n"
        "  shadow_.sync_warps(num_warps_ == 32 ? ~0u : (1u << num_warps_) - 1);\n}\n",
        "a barrier of some warps counts for all",
    ),
    _engine(
        "shadow_orders_by_shuffles",
        _COLLECTIVES,
        "inline void execute_shuffle(Block &block, Warp &warp) {\n",
        "inline void execute_shuffle(Block &block, Warp &warp) {\n  block.sync_warp(warp);\n",
        "a shuffle counts as a barrier of its warp",
    ),
    _engine(
        "shadow_blames_the_wrong_thread",
        _COLLECTIVES,
        "AccessKind::kLdmatrix, block.first_thread(warp) + lane,",
        "AccessKind::kLdmatrix, block.first_thread(warp),",
        "messages name lane 0 for every row of an ldmatrix",
    ),
    _engine(
        "shadow_sees_no_loads",
        "arch/simt/observed.hpp",
        "block.observe_read(address, bytes, AccessKind::kLoad, block.thread_idx(), chain);",
        "",
        "plain loads are not observed",
        observed=True,
    ),
    _engine(
        "shadow_sees_no_stores",
        "arch/simt/observed.hpp",
        "block.observe_write(address, bytes, AccessKind::kStore, block.thread_idx(), chain);",
        "",
        "plain stores are not observed",
        observed=True,
    ),
    # ---- arrivals ----
    _engine(
        "arrivals_need_no_barrier",
        _ARRIVALS,
        "!(store.is_fenced && shadow.is_before(t, store.epoch, thread))",
        "!store.is_fenced",
        "a block may arrive without a barrier behind its stores",
    ),
    _engine(
        "arrivals_need_no_fence",
        _ARRIVALS,
        "!(store.is_fenced && shadow.is_before(t, store.epoch, thread))",
        "!shadow.is_before(t, store.epoch, thread)",
        "a block may arrive without a fence behind its stores",
    ),
    _engine(
        "fences_cover_all_stores",
        _ARRIVALS,
        "if (shadow.is_before(t, store.epoch, thread)) store.is_fenced = true;",
        "store.is_fenced = true;",
        "a fence covers the stores of threads that no barrier has brought before it",
    ),
    _engine(
        "stores_may_follow_an_arrival",
        _ARRIVALS,
        "if (arrived_ >= 0 && !shadow.is_before(arrived_, arrived_epoch_, thread)) return false;",
        "",
        "stores that come after the arrival of another thread are not found",
    ),
    _engine(
        "loads_need_no_fence",
        _ARRIVALS,
        "    if (arrived_ == thread) {\n",
        "    if (arrived_ >= 0) {\n",
        "a fence of any thread counts as that of the one that arrived",
    ),
    _engine(
        "loads_need_no_barrier",
        _ARRIVALS,
        "return acquired_ >= 0 && shadow.is_before(acquired_, acquired_epoch_, thread);",
        "return acquired_ >= 0;",
        "what other blocks left may be read without a barrier behind the arrival",
    ),
    # ---- bank conflicts ----
    _engine(
        "banks_of_64_bytes",
        _BANKS,
        "++rows_in[offsets[i] / 16 % 8];",
        "++rows_in[offsets[i] / 8 % 8];",
        "rows are sorted into the wrong banks",
    ),
    _engine(
        "banks_sum_instead_of_fullest",
        _BANKS,
        "most = most < rows ? rows : most;",
        "most += rows > 1;",
        "every row in a used bank counts, not the fullest banks",
    ),
    _engine(
        "banks_of_half_the_words",
        _BANKS,
        "std::vector<uint32_t> &words = words_in[word % 32];",
        "std::vector<uint32_t> &words = words_in[word % 16];",
        "plain accesses are sorted into the wrong banks",
        observed=True,
    ),
    _engine(
        "banks_of_vectors_in_one_pass",
        _BANKS,
        "a.lane * a.bytes / 128",
        "a.lane / 32",
        "a vector access of all lanes counts as one pass",
        observed=True,
    ),
    _engine(
        "banks_of_a_loop_mixed",
        _BANKS,
        "accesses[i].n = accesses[i - 1].n + 1;",
        "accesses[i].n = 0;",
        "the accesses of a lane in a loop count as one instruction",
        observed=True,
    ),
    # ---- rules ----
    _engine(
        "copies_land_at_once",
        _COPIES,
        "std::memset(destination, SharedMemory::kPoison, kBytes);",
        "if (load) std::memcpy(destination, source, kBytes);",
        "a cp.async is there before its wait",
    ),
    _engine(
        "wait_covers_one_group_more",
        _COPIES,
        "const size_t num_groups = groups_.size() - num_pending;",
        "const size_t num_groups = groups_.size() - (num_pending > 0 ? num_pending - 1 : 0);",
        "cp_async_wait(n) leaves n - 1 groups pending",
    ),
    _engine(
        "guards_are_not_looked_at",
        "arch/simt/shared_memory.hpp",
        "if (begin_[bytes_ + i] != kPoison || *(begin_ - 1 - i) != kPoison) return false;",
        "",
        "writes outside shared memory are not found",
    ),
    _engine(
        "copies_may_be_misaligned",
        _COLLECTIVES,
        "if (load && reinterpret_cast<uintptr_t>(source) % CpAsyncQueue::kBytes != 0) {",
        "if (false) {",
        "misaligned sources of cp.async are not found",
    ),
    _engine(
        "lanes_may_diverge",
        _MEETINGS,
        "warp.collective != &collective || warp.barrier != barrier || "
        "warp.barrier_threads != barrier_threads",
        "false",
        "lanes that meet in different collectives are not found",
    ),
    _engine(
        "inactive_lanes_may_be_missing",
        _MEETINGS,
        "if (warp.collective->needs_full_warp && warp.live != kFullWarp) {",
        "if (false) {",
        "an mma with inactive lanes is not found",
    ),
    _engine(
        "copies_may_be_left_in_flight",
        _BLOCK,
        "if (copies.num_unwaited() != 0) {",
        "if (false) {",
        "copies in flight at the end are not found",
    ),
    _engine(
        "schedule_ignores_its_seed",
        "arch/simt/schedule.hpp",
        "in_order_ = seed == 0;",
        "in_order_ = true;",
        "every schedule is program order",
    ),
    # ---- clusters ----
    _engine(
        "clusters_share_what_was_not_fenced",
        _ASYNC,
        "barrier.is_shared = barrier.is_fenced;",
        "barrier.is_shared = true;",
        "a missing fence_mbarrier_init is not found",
    ),
    _engine(
        "ctas_may_leave_their_cluster",
        _ASYNC,
        "if (barrier.is_touched || barrier.was_touched)",
        "if (false)",
        "a CTA that did not wait for the other one is found in some schedules only",
    ),
    _engine(
        "halves_may_come_before_the_last_was_seen",
        _ASYNC,
        "if (&block != &there && !full.is_observed)",
        "if (false)",
        "a load over what the other CTA has not waited for is not found",
    ),
    # ---- bytes ----
    _engine(
        "bytes_of_a_are_signed",
        "arch/simt/wgmma.hpp",
        "static_cast<int32_t>(static_cast<ByteA>(from.a_bytes[m][k]))",
        "static_cast<int32_t>(static_cast<int8_t>(from.a_bytes[m][k]))",
        "wgmma of bytes takes unsigned ones as signed",
    ),
    _engine(
        "halves_of_a_registers_swapped",
        "arch/simt/wgmma.hpp",
        "std::memcpy(&to.a_bytes[g + i % 2 * 8][4 * t + i / 2 * 16], &registers[i], 4);",
        "std::memcpy(&to.a_bytes[g + i / 2 * 8][4 * t + i % 2 * 16], &registers[i], 4);",
        "wgmma of bytes takes rows for columns of A",
    ),
    _engine(
        "bulk_copies_are_swizzled",
        "arch/simt/tensor_map.hpp",
        "map.swizzle_bytes = 16;",
        "map.swizzle_bytes = 128;",
        "copies without a map move pieces of 16 bytes to other places",
    ),
)
