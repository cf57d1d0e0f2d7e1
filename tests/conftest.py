"""For every test, before torch is imported."""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Idle OpenMP threads sleep instead of spinning: with fewer free cores than threads they would slow everything tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Without a GPU the Triton kernels run in Triton's interpreter, which is chosen as Triton is imported. The driver's
# device file tells, where torch.cuda would have to be imported.
if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` where there is none."""
    if item.get_closest_marker("gpu"):
        import torch  # not before the tests have said what its kernels run in

        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where more tests were skipped than FASTWEIGHTS_MOST_SKIPPED says: what never runs proves nothing."""
    most, reporter = (
        os.environ.get("FASTWEIGHTS_MOST_SKIPPED"),
        session.config.pluginmanager.get_plugin("terminalreporter"),
    )
    if most is None or reporter is None:  # a worker process has no reporter: the first process counts for all
        return
    skipped = len(reporter.stats.get("skipped", []))
    if skipped > int(most):
        reporter.write_line(f"\n{skipped} tests were skipped, and FASTWEIGHTS_MOST_SKIPPED is {most}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set torch's number of threads, which is as it was after the test."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _root_of(name: str) -> str:
    root = os.environ.get("FASTWEIGHTS_DATA")
    if not root or not (Path(root) / name).is_dir():
        pytest.skip(f"FASTWEIGHTS_DATA is not set, or has no {name}")
    return root


@pytest.fixture
def omniglot_root() -> str:
    """The folder that has Omniglot's, for tests that read the real drawings."""
    return _root_of("omniglot")


@pytest.fixture
def mnist_root() -> str:
    """The folder that has MNIST's, for tests that read the real digits."""
    return _root_of("mnist")


@pytest.fixture
def fer2013_root() -> str:
    """The folder that has FER2013's, for tests that read the real faces."""
    return _root_of("fer2013")


@pytest.fixture
def mini_imagenet_root() -> str:
    """The folder that has mini-ImageNet's, for tests that read the real images."""
    return _root_of("mini-imagenet")


@pytest.fixture
def ptb_root() -> str:
    """The folder that has the Penn Treebank's, for tests that read the real sentences."""
    return _root_of("ptb")


@pytest.fixture
def wikitext2_root() -> str:
    """The folder that has WikiText-2's, for tests that read the real articles."""
    return _root_of("wikitext-2")


@pytest.fixture
def gutenberg_root() -> str:
    """The folder that has the books of Project Gutenberg, for tests that read the real ones."""
    return _root_of("gutenberg")


@pytest.fixture
def reuters21578_root() -> str:
    """The folder that has Reuters-21578, for tests that read the real articles."""
    return _root_of("reuters21578")


@pytest.fixture
def full_disk() -> Iterator[Callable[[int], None]]:
    """Limits the size of a file, as a full disk would: `full_disk(bytes)`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
