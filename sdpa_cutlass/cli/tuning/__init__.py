"""The `tune` command: which kernel is the fastest where, measured; and what follows from the measurements.

arguments.py  the command line; imports nothing that takes time
command.py    what each form of the command does
tasks.py      problems to measure, the most valuable first
sweep.py      one problem: candidate kernels, each checked and timed; then all problems within a budget
journal.py    the raw measurements: a file that only grows
derive.py     journal → best kernels per bucket → tuned table
choice.py     journals → the smallest set of tiles that stays near the best, by cover.py
model.py      journals → how well the cost model predicts
"""
