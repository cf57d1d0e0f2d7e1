"""The layout keeps its rules: dependencies point downwards, and nothing private is imported from another folder."""

import subprocess
import sys

import grimp

PACKAGE = "fastweights"


def test_dependencies_point_downwards_only():
    # In a process of its own: import-linter silences the loggers of the process that it runs in.
    check = "from importlinter import cli; raise SystemExit(cli.lint_imports(no_cache=True))"
    finished = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_no_folder_imports_a_private_module_of_another():
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    private = {module for module in graph.modules if module.rpartition(".")[2].startswith("_") and "__" not in module}
    assert private  # the rule is about something
    for module in private:
        folder = module.rpartition(".")[0]
        strangers = {
            importer
            for importer in graph.find_modules_that_directly_import(module)
            if importer != folder and not importer.startswith(f"{folder}.")
        }
        assert not strangers, f"{module} is private to {folder}: give what {strangers} need a public name"
