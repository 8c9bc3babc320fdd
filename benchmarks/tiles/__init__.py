"""Which tiles should ship, and how well the cost model predicts: both from the journals of `tune`.

python -m benchmarks.tiles     (see __main__.py)

choice.py  cover.py     the smallest set of tiles that stays near the best everywhere
model.py                regret, rank correlation and scale of the cost model
constants.py            which constants of prices lose least, at all problems at which kernels were timed
corrections.py          what kernels take beside their prices, from all problems at which they were timed
"""
