"""The `profile` command: what a kernel's code says, and what a GPU's counters say about a launch.

arguments.py   the command's options
command.py     what each form of the command does
problems.py    `--shape` → a problem; what the profiled process is told
static.py      registers, occupancy, loops and costs of compiled kernels, as plain data
view.py        that data and a diagnosis as one screen of text
ncu.py         which counters, the call of ncu, and its CSV
diagnosis.py   counters → what bounds the kernel
child.py       the process that ncu watches: a warm-up and one launch
"""
