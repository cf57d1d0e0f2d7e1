"""For every test, before torch is imported."""

import os

# Idle OpenMP threads sleep instead of spinning: with fewer free cores than threads they would slow everything tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
