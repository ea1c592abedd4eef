"""The only code that imports torch."""

import os

# Read when torch is loaded: torch's threads that spin for their next operation hold the cores that the kernels' own
# threads need (csrc/pool.h).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
