"""Edge cases of attention: what torch's backends and this library return, measured.

python -m benchmarks.semantics     (see __main__.py)

outcomes.py    a call, its right answer, and results in words ("right", "0", "NaN", "refused", ...)
inputs.py      what the cases are made of
visibility.py  values.py  shapes.py     the cases by topic; each says what this library promises
cases.py       all of them, in the order of the tables
backends.py    who answers: torch's backends and this library
table.py       saved answers → the tables of docs/edge-cases.md
"""
