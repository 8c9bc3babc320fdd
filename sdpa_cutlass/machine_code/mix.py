"""An instruction mix: how often each opcode stands in a loop or a kernel, and what that costs.

Cycles are those of one SM sub-partition (a quarter of an SM: one scheduler, one tensor core) for one warp.
Rates are the CUDA C++ Programming Guide's (throughput of native arithmetic instructions, compute capability
8.6 to 9.0), in threads a clock and SM: fp32 128, 32-bit integer multiply, add, compare, shift, logic and
conversion 64, special functions 16, shuffles 32; shared memory moves 128 bytes a clock and SM, so a quarter
of an SM gets 32. The compiler's moves (IMAD.MOV) count as integer multiplies. What an instruction waits for
is not in these numbers.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sdpa_cutlass.library.device import imma_ops_per_clock
from sdpa_cutlass.machine_code.sass import NEVER, Instruction

NOTHING = "NOP"  # also what stands for an instruction that never executes

# A group and the opcodes (without modifiers) that belong to it; the first match counts.
GROUPS: dict[str, str] = {
    "HMMA": "HMMA",
    "IMMA": "IMMA",
    "LDSM": "LDSM",
    "LDGSTS": "LDGSTS",
    "LDG": "LDG|LD",
    "STG": "STG|ST|RED|ATOM|ATOMG",
    "LDS": "LDS|ATOMS",
    "STS": "STS",
    "LDL": "LDL",
    "STL": "STL",
    "MUFU": "MUFU",
    "FP32": "FFMA|FMUL|FADD",
    "IMAD": "IMAD",
    "convert": "F2F|F2FP|F2I|F2IP|I2F|I2FP|I2I|I2IP|FRND",
    "shuffle": "SHFL|VOTE|MATCH|REDUX",
    "barrier": "BAR|DEPBAR|LDGDEPBAR|WARPSYNC|MEMBAR|ERRBAR|CCTL",
    "branch": "BRA|BRX|BRXU|JMP|JMX|JMXU|CALL|RET|EXIT|BSSY|BSYNC|BREAK|KILL|YIELD|BMOV",
    "uniform": r"U[A-Z]\w*|R2UR|S2UR",
    "other": "NOP|S2R|CS2R|LDC|NANOSLEEP",
    "ALU": r"\w+",  # IADD3, LOP3, SHF, ISETP, FSETP, FMNMX, FSEL, SEL, MOV, PRMT, LEA, ...
}
_GROUP_PATTERNS = [(group, re.compile(pattern)) for group, pattern in GROUPS.items()]

_WIDTH = re.compile(r"\.(U8|S8|U16|S16|64|128)(?=\.|$)")
_WIDTH_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_MMA_FLOPS = {"16816": 4096, "1688": 2048}
_IMMA_OPS = 8192  # of m16n8k32, a multiply-add is two
_WAVEFRONT_BYTES = 128
_WARP = 32
_QUARTERS = 4  # sub-partitions of an SM
# Cycles of a sub-partition for one warp's instruction.
_ALU_CYCLES = 2.0
_MUFU_CYCLES = 8.0


@functools.cache
def group_of(opcode: str) -> str:
    """The group of GROUPS that an opcode, with or without modifiers, belongs to."""
    base = opcode.partition(".")[0]
    return next(group for group, pattern in _GROUP_PATTERNS if pattern.fullmatch(base))


@functools.cache
def access_bytes(opcode: str) -> int:
    """Bytes that one thread moves with a load or store: LDG.E.128 → 16, STS → 4."""
    width = _WIDTH.search(opcode)
    return _WIDTH_BYTES[width[1]] if width else 4


@dataclass(frozen=True, slots=True)
class Mix:
    """`opcodes`: how often each full opcode occurs."""

    opcodes: Mapping[str, int]

    @classmethod
    def of(cls, instructions: Iterable[Instruction]) -> Mix:
        """Counts instructions; those that are never executed count as NOPs."""
        counts = Counter(NOTHING if i.predicate == NEVER else i.opcode for i in instructions)
        return cls(dict(sorted(counts.items())))

    @property
    def instructions(self) -> int:
        """All of them: the issue slots that one warp needs for one pass, when it takes no shortcut."""
        return sum(self.opcodes.values())

    @property
    def groups(self) -> dict[str, int]:
        """Instructions per group of GROUPS, zeros included."""
        counts = dict.fromkeys(GROUPS, 0)
        for opcode, count in self.opcodes.items():
            counts[group_of(opcode)] += count
        return counts

    def count(self, pattern: str) -> int:
        """Instructions whose full opcode begins with a match of the regular expression."""
        return sum(count for opcode, count in self.opcodes.items() if re.match(pattern, opcode))

    def widths(self, group: str) -> dict[int, int]:
        """Loads or stores of a group by the bytes that a thread moves: {16: 8, 4: 4}."""
        counts: Counter[int] = Counter()
        for opcode, count in self.opcodes.items():
            if group_of(opcode) == group:
                counts[access_bytes(opcode)] += count
        return dict(sorted(counts.items(), reverse=True))

    def cycles(self, mma_flops_per_clock: int) -> dict[str, float]:
        """Cycles that one pass of one warp keeps each unit of its sub-partition busy.

        `mma_flops_per_clock` is the SM's rate for fp16 operands and fp32 accumulation.
        """
        groups = self.groups
        flops = sum(
            count * next((f for shape, f in _MMA_FLOPS.items() if shape in opcode), 4096)
            for opcode, count in self.opcodes.items()
            if opcode.startswith("HMMA")
        )
        imma_rate = imma_ops_per_clock(mma_flops_per_clock)
        # Half of the fp32 lanes also multiply integers.
        fma = max(float(groups["FP32"] + groups["IMAD"]), 2.0 * groups["IMAD"])
        return {
            "tensor": _QUARTERS * (flops / mma_flops_per_clock + _IMMA_OPS * groups["IMMA"] / imma_rate),
            "issue": float(self.instructions),
            "xu": _MUFU_CYCLES * groups["MUFU"],
            "alu": _ALU_CYCLES * (groups["ALU"] + groups["convert"]),
            "fma": fma,
            "shared": float(_QUARTERS * self._wavefronts()),
        }

    def _wavefronts(self) -> int:
        """Passes of 128 bytes through shared memory, without bank conflicts; a shuffle takes one, too."""
        total = 0
        for opcode, count in self.opcodes.items():
            group = group_of(opcode)
            if group == "LDSM":
                total += count * int(opcode.rpartition(".")[2])  # each of up to four matrices is 128 bytes
            elif group in ("LDS", "STS", "LDGSTS"):
                total += count * max(1, access_bytes(opcode) * _WARP // _WAVEFRONT_BYTES)
            elif opcode.startswith("SHFL"):
                total += count
        return total
