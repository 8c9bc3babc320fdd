"""Small disassemblies, in the form in which nvdisasm prints them, and what they are."""

from __future__ import annotations

from sdpa_cutlass.machine_code import sass


def listing(name: str, body: str) -> str:
    """The text of one function: `body` has one instruction or label a line, addresses are put in front."""
    lines, address = [], 0
    for line in body.strip().splitlines():
        line = line.strip()
        if line.endswith(":"):
            lines.append(line)
        else:
            lines.append(f"        /*{address:04x}*/                   {line} ;")
            address += sass.INSTRUCTION_BYTES
    header = [
        f'\t.section\t.text.{name},"ax",@progbits',
        '\t.sectioninfo\t@"SHI_REGISTERS=8"',
        f".text.{name}:",
    ]
    return "\n".join([*header, *lines]) + "\n"


def code(body: str) -> list[sass.Instruction]:
    """The instructions of a function."""
    return sass.parse(listing("f", body))["f"]


# Two loops, one inside the other. The inner loop has a rare side that lies behind the function's end, and an
# instruction between the two loops' branches that belongs to neither.
NESTED = """
    MOV R0, RZ
    .L_x_0:
    IADD3 R0, R0, 0x1, RZ
    .L_x_1:
    HMMA.16816.F32 R4, R8, R2, R4
    @!PT LDS RZ, [RZ]
    @P0 BRA `(.L_x_2)
    FADD R1, R1, R2
    .L_x_3:
    LDSM.16.M88.4 R8, [R0]
    @P1 BRA `(.L_x_1)
    @P2 BRA `(.L_x_0)
    EXIT
    .L_x_2:
    FMUL R1, R1, R2
    BRA `(.L_x_3)
    .L_x_4:
    BRA `(.L_x_4)
"""
