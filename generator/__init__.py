"""Decides which kernels exist and writes the C++ units that instantiate them: `python -m generator`.

`families/F` says what the kernels of a family are (`config.py`), which are legal (`rules.py`) and which are
built (`tiles.py`, the file to edit). `core` makes names, spaces and text of that, and names no family.
Nothing here knows how attention is computed.
"""
