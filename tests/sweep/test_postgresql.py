"""Workers without a folder in common share the trials of a search through a PostgreSQL server."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.sweep import fake_experiment
from tests.sweep.helpers import start, trials

pytestmark = pytest.mark.slow


def find_programs():
    """Return the folder of the server's programs, which Debian keeps away from the path; None where there is none."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    found = [str(folder / "initdb") for folder in folders] + [shutil.which("initdb")]
    return next((Path(path).parent for path in found if path and Path(path).exists()), None)


@pytest.fixture
def server():
    """The address of a database of a server of its own."""
    pytest.importorskip("psycopg", reason="psycopg, the driver of PostgreSQL, is not installed")
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server is not installed")
    user = "postgres" if os.getuid() == 0 else None  # the server does not run as root
    folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
    if user is not None:
        try:
            shutil.chown(folder, user)
        except LookupError:
            pytest.skip("PostgreSQL's server does not run as root, and there is no user postgres")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def call(program, *words):
        subprocess.run([programs / program, "-D", folder / "data", *words], user=user, cwd=folder, check=True)

    call("initdb", "--username=sweeper", "--auth=trust", "--no-sync")
    options = f"-k {folder} -h 127.0.0.1 -p {port} -c fsync=off"
    call("pg_ctl", "-o", options, "-l", folder / "log", "-w", "start")
    try:
        yield f"postgresql+psycopg://sweeper@127.0.0.1:{port}/postgres"
    finally:
        call("pg_ctl", "-m", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.mark.parametrize("sampler", ["grid", "random"])
def test_two_machines_share_a_search_and_one_may_die(server, tmp_path, sampler):
    machines = [tmp_path / name for name in ("one", "two")]
    words = [fake_experiment.NAME, "--search", "steps=1:6" if sampler == "grid" else "x=0:8", "--sampler", sampler]
    words += ["--trials", "6"] if sampler == "random" else []
    words += ["--seconds", "0.9", "--storage", server, "--output", "sweep"]
    workers = []
    for machine in machines:
        machine.mkdir()
        workers.append(start(words, cwd=machine))
    assert workers[0].stderr is not None
    begins = (line for line in workers[0].stderr if " begins" in line)
    assert next(begins)
    assert next(begins)  # of its second trial
    time.sleep(0.3)  # of the 0.9 seconds that it takes
    workers[0].send_signal(signal.SIGKILL)
    _, errors = workers[1].communicate(timeout=100)
    workers[0].communicate()
    assert workers[1].returncode == 0, errors
    rows = trials(machines[1] / "sweep")
    finished = [row for row in rows if row["state"] == "finished"]
    assert len(finished) == len({str(row["params"]) for row in finished}) == 6
    assert len({row["worker"] for row in finished}) == 2
    lost = [row for row in rows if row["state"] == "lost"]
    assert len(lost) == 1
    assert len(rows) == 7
    begun = Counter(path.parent.name for machine in machines for path in machine.rglob("begun"))
    twice = [folder for folder, count in begun.items() if count > 1]
    assert [Path(row["folder"]).name for row in lost] == twice  # no other was begun a second time
    assert all(path.read_text().count("begun") == 1 for machine in machines for path in machine.rglob("begun"))
    # The same command has nothing left to do, on the machine that died too.
    again = start(words, cwd=machines[0])
    _, errors = again.communicate(timeout=60)
    assert again.returncode == 0, errors
    assert " begins" not in errors
    assert [row["params"] for row in trials(machines[0] / "sweep")] == [row["params"] for row in rows]
