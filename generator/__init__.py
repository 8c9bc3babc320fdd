"""Decides which kernels exist and writes the C++ units that instantiate them: `python -m generator`.

`space.py` says what to build, `rules.py` what is legal, `config.py` what follows from a choice, `render.py`
how it reads as C++ and `writer.py` how it reaches the disk. Nothing here knows how attention is computed.
"""
