"""`python -m sdpa_cutlass`; see cli/."""

import sys

from sdpa_cutlass.cli import main

sys.exit(main())
