"""python -m benchmarks.models: see the package."""

from __future__ import annotations

import sys

from benchmarks.models import main

if __name__ == "__main__":
    sys.exit(main())
