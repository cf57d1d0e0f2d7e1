"""The layout keeps its rules: dependencies point downwards, and nothing private is imported from another folder."""

import grimp
import pytest
from importlinter import cli

PACKAGE = "fastweights"


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph(PACKAGE)


def test_dependencies_point_downwards_only(capsys):
    assert cli.lint_imports(no_cache=True) == 0, capsys.readouterr().out


def test_no_folder_imports_a_private_module_of_another(graph):
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
