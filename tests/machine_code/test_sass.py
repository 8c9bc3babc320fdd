"""The disassembler's text → instructions and loops."""

from __future__ import annotations

import pytest

from sdpa_cutlass.machine_code import loops, sass

from .listings import NESTED, code, listing


def test_instructions_are_read() -> None:
    predicated, plain = code(
        "@!P0 BRA `(.L_x_2)\n.L_x_2:\nLDGSTS.E.BYPASS.LTC128B.128 [R2+0x40], [R8.64], !P1"
    )
    assert (predicated.predicate, predicated.opcode, predicated.targets) == ("@!P0", "BRA", (1,))
    assert plain.base == "LDGSTS"
    assert plain.operands == "[R2+0x40], [R8.64], !P1"
    assert plain.predicate is None
    assert plain.targets == ()


def test_targets_of_an_indirect_branch_are_in_a_comment() -> None:
    body = '.L_x_0:\nBRXU UR4 -0x40 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)\n.L_x_1:\nEXIT'
    assert code(body)[0].targets == (0, 1)


def test_functions_are_told_apart() -> None:
    text = (
        listing("f", "EXIT") + "\n//------\n" + listing("_ZN4sdpa1gEv", "NOP\nBRA `(.L_x_9)\n.L_x_9:\nEXIT")
    )
    assert {name: len(code) for name, code in sass.parse(text).items()} == {"f": 1, "_ZN4sdpa1gEv": 3}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (listing("f", "BRA `(.L_x_7)"), "no label"),
        (listing("f", "NOP\nNOP").replace("/*0000*/", "/*zzzz*/"), "before .* is not understood"),
    ],
)
def test_text_that_is_not_understood_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        sass.parse(text)


def test_loops_follow_control_not_addresses() -> None:
    instructions = code(NESTED)
    outer, inner = loops.find_loops(instructions)
    assert (outer.header, inner.header) == (1, 2)
    # The rare side (10, 11) belongs to the inner loop although it lies behind EXIT; 8 only to the outer one.
    assert inner.instructions == (2, 3, 4, 5, 6, 7, 10, 11)
    assert outer.instructions == (1, *inner.instructions[:6], 8, 10, 11)


def test_what_no_branch_goes_around() -> None:
    outer, inner = loops.find_loops(code(NESTED))
    assert inner.always == 5  # not FADD, nor FMUL and its branch
    assert outer.always == 7


def test_a_whole_pass_takes_the_shortest_way_with_all_products() -> None:
    _, inner = loops.find_loops(code(NESTED))
    assert inner.whole == (2, 3, 4, 5, 6, 7)  # past FADD, not the rare side, which takes a branch more
    body = """
        .L_x_0:
        HMMA.16816.F32 R4, R8, R2, R4
        @P0 BRA `(.L_x_1)
        LDGSTS.E.BYPASS.128 [R2], [R8.64]
        .L_x_1:
        @P1 BRA `(.L_x_2)
        IMMA.16832.U8.S8 R4, R8.ROW, R2.COL, R4
        NOP
        BRA `(.L_x_3)
        .L_x_2:
        NOP
        .L_x_3:
        @P2 BRA `(.L_x_0)
        EXIT
    """
    (loop,) = loops.find_loops(code(body))
    assert loop.whole == (0, 1, 2, 3, 4, 5, 6, 8)  # with the copy and all products: not the shortest way


def test_unreachable_code_is_no_loop() -> None:
    assert loops.find_loops(code("EXIT\n.L_x_0:\nBRA `(.L_x_0)")) == []


def test_a_loop_of_one_block_and_two_latches_of_one_header() -> None:
    (single,) = loops.find_loops(code(".L_x_0:\nNOP\n@P0 BRA `(.L_x_0)\nEXIT"))
    assert single.instructions == (0, 1)
    body = ".L_x_0:\nNOP\n@P0 BRA `(.L_x_0)\nFADD R0, R0, R0\n@P1 BRA `(.L_x_0)\nEXIT"
    (both,) = loops.find_loops(code(body))
    assert both.instructions == (0, 1, 2, 3)
    assert both.always == 2
    sides = ".L_x_0:\n@P0 BRA `(.L_x_1)\nFADD R0, R0, R0\nBRA `(.L_x_0)\n.L_x_1:\nNOP\nBRA `(.L_x_0)"
    (either,) = loops.find_loops(code(sides))
    assert either.instructions == (0, 1, 2, 3, 4)
    assert either.always == 1


def test_calls_of_subroutines_come_back_and_far_jumps_do_not() -> None:
    body = """
        .L_x_0:
        CALL.REL.NOINC `($__internal_0_$__cuda_sm70_shflsync_bfly_p)
        @!P2 CALL.REL.NOINC `(.L_x_0)
        EXIT
        $__internal_0_$__cuda_sm70_shflsync_bfly_p:
        RET.REL.NODEC R6 `(f)
    """
    (loop,) = loops.find_loops(code(body))
    assert loop.instructions == (0, 1)


def test_branches_with_their_condition_among_the_operands() -> None:
    body = "BRA.DIV ~URZ, `(.L_x_1)\n.L_x_0:\nNOP\n@P0 BRA `(.L_x_0)\nEXIT\n.L_x_1:\nBRA `(.L_x_0)"
    (loop,) = loops.find_loops(code(body))
    assert loop.instructions == (1, 2)
