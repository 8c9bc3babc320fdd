"""What the compiler made of the kernels, read from the built library's machine code. Needs no GPU.

tools.py      finds cuobjdump and nvdisasm, and takes the library apart with them
sass.py       the disassembler's text → instructions
loops.py      instructions → control flow → loops
mix.py        opcodes → groups, access widths, cycles of each unit
occupancy.py  registers, shared memory and threads → CTAs per SM
kernels.py    all of it for every kernel of a library, kept between runs
expected.py   what the counts of a fused kernel must be, from its tile alone
gates.py      the committed table of all this, and the comparison with a library
"""
