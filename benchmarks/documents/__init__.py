"""The tables and pictures of README.md, docs/performance.md and docs/results.md, made from result files.

python -m benchmarks.documents     (see __main__.py)

report.py        blocks between markers: which files each is made from, and which section it shows
front.py  short_tables.py  naive_tables.py  goal_tables.py  agreement.py     the sections' text
"""
