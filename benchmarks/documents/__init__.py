"""The result tables and pictures of README.md and docs/results.md, made from committed result files.

python -m benchmarks.documents     (see __main__.py)

report.py        blocks between markers: which files each is made from, and which section it shows
short_tables.py  naive_tables.py  goal_tables.py  agreement.py     the sections' text
"""
