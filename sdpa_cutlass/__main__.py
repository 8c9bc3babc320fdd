"""`python -m sdpa_cutlass`; see cli/.

Ends with 141 when the reader of its output, such as `head`, has seen enough.
"""

import os
import sys

from sdpa_cutlass.cli import main

try:
    status = main()
    sys.stdout.flush()
except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
    status = 128 + 13  # SIGPIPE, as a shell says it
sys.exit(status)
