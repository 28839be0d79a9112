# SPDX-License-Identifier: Apache-2.0
"""tools/count_kernel.py reads machine code: on a listing small enough to count by hand."""

from __future__ import annotations

import pytest

from tools.sass import cheapest_round, parse, pipe

# A loop over two products each turn, of which a rare branch (@P1) rescales and the last turn leaves by @P2.
LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R4], [R6.64] ;
        /*0020*/                   IADD3 R6, R6, 0x10, RZ ;
.L_x_2:
        /*0030*/                   LDSM.16.M88.4 R8, [R4] ;
        /*0040*/               @P0 HMMA.16816.F32.BF16 R12, R8, R10, R12 ;
        /*0050*/              @!P1 BRA `(.L_x_3) ;
        /*0060*/                   MUFU.EX2 R2, R2 ;
        /*0070*/                   FMUL R12, R12, R2 ;
.L_x_3:
        /*0080*/                   MUFU.EX2 R3, R3 ;
        /*0090*/                   BRX R9 -0x20 (*"BRANCH_TARGETS .L_x_2,.L_x_4"*);
.L_x_4:
        /*00a0*/               @P2 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
"""


def test_the_cheapest_turn_that_does_what_a_turn_must() -> None:
    turn = cheapest_round(parse(LISTING), {"LDGSTS": 1, "MUFU.EX2": 2}, {"LDSM": 2})
    assert dict(turn) == {
        "LDGSTS.E.BYPASS.128": 1, "IADD3": 1, "LDSM.16.M88.4": 2, "HMMA.16816.F32.BF16": 2, "MUFU.EX2": 2, "BRX": 2,
        "BRA": 3,
    }  # fmt: skip


def test_a_turn_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="no loop issues"):
        cheapest_round(parse(LISTING), {"LDGSTS": 2, "MUFU.EX2": 1}, {})


def test_pipes() -> None:
    opcodes = ("HMMA.16816.F32", "MUFU.EX2", "LDSM.16", "BAR.SYNC", "UIADD3", "F2FP.BF16", "FFMA", "FMNMX")
    assert [pipe(opcode) for opcode in opcodes] == [
        "MMA", "MUFU", "load/store", "control", "uniform", "convert", "FMA", "ALU",
    ]  # fmt: skip
