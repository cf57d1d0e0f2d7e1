from tests.fake_runs import run_folder, write_run

__all__ = ["run_folder", "write_run"]
