"""For every test, before torch is imported."""

import os

# Idle OpenMP threads sleep instead of spinning: with fewer free cores than threads they would slow everything tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Without a GPU the Triton kernels run in Triton's interpreter, which is chosen as Triton is imported. The driver's
# device file tells, where torch.cuda would have to be imported.
if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
