import gc
import gzip
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastweights.tasks import datasets

from .archives import LABELS, MEMBERS, members_sha256, sha256, zip_bytes
from .small_sets import FREE_SET, PLAIN_SET, Server


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()
    # The downloader leaves sockets to the collector, which must not find them in another test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """No test but those of the real files sees the user's own data, or a proxy."""
    if request.node.get_closest_marker("data") is None:
        monkeypatch.delenv("FASTWEIGHTS_DATA", raising=False)
        monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache" / project)
        monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """Two small sets: one that cannot be downloaded, one that the server has."""
    plain = datasets.DataSet(
        PLAIN_SET,
        "Tiny text",
        "no open licence",
        "https://example.org/text",
        "one word a line",
        (
            datasets.DataFile("train.txt", 5, sha256(b"a\nb\nc")),
            datasets.DataFile("test.txt", 1, sha256(b"d")),
        ),
        megabytes=1,
    )
    free = datasets.DataSet(
        FREE_SET,
        "Tiny digits",
        "free to use",
        "https://example.org/digits",
        "labels and images",
        (
            datasets.DataFile("labels.gz", len(LABELS), sha256(LABELS), server.url("labels.gz")),
            datasets.DataFile("images.zip", 2, members_sha256(MEMBERS), server.url("images.zip")),
        ),
        megabytes=1,
    )
    monkeypatch.setitem(datasets.DATASETS, PLAIN_SET, plain)
    monkeypatch.setitem(datasets.DATASETS, FREE_SET, free)
    server.files.update({"labels.gz": gzip.compress(LABELS), "images.zip": zip_bytes(MEMBERS)})
