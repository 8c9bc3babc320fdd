"""The tables and pictures of README.md and of pages in docs/, made from result files.

python -m benchmarks.documents     (see __main__.py)

report.py        blocks between markers: which files each is made from, and which section it shows
explore.py       the interactive page
sections.py      each kind of block
front.py  short_tables.py  naive_tables.py  goal_tables.py  agreement.py     the text of sections
prediction_tables.py  model_quality.py  kernel_rows.py                       and of predictions
"""
