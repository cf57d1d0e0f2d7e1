"""The database of a search: optuna's storage, quiet, its errors in one line."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fastweights.errors import FastWeightsError, RunError

if TYPE_CHECKING:
    import optuna

HEARTBEAT_SECONDS = 5  # between a worker's signs of life
GRACE_SECONDS = 30  # without one, and its trial is taken from it
BUSY_SECONDS = 60  # to wait for the lock of an SQLite file


def require_optuna() -> ModuleType:
    """The optuna module, quiet.

    Raises:
        FastWeightsError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise FastWeightsError(f"a sweep needs optuna ({error}): pip install 'fastweights[sweep]'") from None
    # Ours are the lines to read; optuna's errors go where the program's own log goes.
    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def open_storage(url: str) -> "optuna.storages.RDBStorage":
    """Optuna's storage with heartbeats, its tables made where there are none.

    Raises:
        RunError: there is no such database.
    """
    import optuna
    import sqlalchemy

    local = url.startswith("sqlite")
    # Python's sqlite3 would begin a transaction only at the first write: two workers could then read that a trial
    # waits, and both take it. Begun at once, and as a writer, every look at the trials has the database to itself.
    arguments = {"connect_args": {"timeout": BUSY_SECONDS, "isolation_level": None}} if local else None
    with quiet(), storage_errors(url):
        try:
            storage = optuna.storages.RDBStorage(
                url, engine_kwargs=arguments, heartbeat_interval=HEARTBEAT_SECONDS, grace_period=GRACE_SECONDS
            )
        except RuntimeError as error:  # tables of another version of optuna
            raise RunError(f"cannot use the storage: {error}") from error
        if local:
            sqlalchemy.event.listen(storage.engine, "begin", lambda on: on.exec_driver_sql("BEGIN IMMEDIATE"))
        return storage


@contextlib.contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """A database that fails is an error of one line, the password left out of it."""
    import optuna
    import sqlalchemy

    try:
        yield
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        reason = str(getattr(cause, "orig", None) or cause or error).splitlines()[0]
        try:
            shown = sqlalchemy.make_url(url).render_as_string(hide_password=True)
        except sqlalchemy.exc.SQLAlchemyError:
            shown = "that --storage names"
            reason = f"{url!r} is no URL such as sqlite:///study.db or mysql+pymysql://user@host/database"
        raise RunError(
            f"cannot use the storage {shown}: {reason}; mend it and give the same command again, or choose another "
            "--storage"
        ) from error


def require_database(url: str) -> None:
    """Refuse a database that is not there before a folder is made."""
    import sqlalchemy

    with storage_errors(url):
        try:
            engine = sqlalchemy.create_engine(url)
        except ImportError as error:
            raise RunError(f"--storage needs the database's driver ({error}): install it with pip") from error
        if not url.startswith("sqlite"):  # where the first look would make the file
            engine.connect().close()
        engine.dispose()


def sqlite_url(output: Path) -> str:
    """The address of the file in a search's folder, where no other database is given.

    Raises:
        RunError: the folder's name cannot stand in an address.
    """
    path = (output / "study.db").as_posix()
    if "?" in path:
        raise RunError(f"--output {output}: a question mark would end the database's address; choose another name")
    return f"sqlite:///{path}".replace("{", "{{").replace("}", "}}")  # optuna fills in what stands in braces


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without optuna's warnings that heartbeats are experimental and belong to its own loop."""
    import optuna

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed to be used with Study.optimize")
        yield
