"""Memory that stays with the process."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from fastweights._allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
pages = []
for _ in range(30):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(40 << 20, dtype=torch.uint8).fill_(1)
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(pages[-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is asked")
def test_memory_that_is_given_back_costs_no_page_faults_again():
    faults = [
        int(subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True).stdout)
        for how in ("as it is", "kept")
    ]
    assert faults[1] < 10 < faults[0]
