"""What `make test` runs of what a change can break."""
import json
import subprocess

import pytest

import changed


@pytest.fixture
def project(tmp_path):
    "A small repository: two modules with a notebook each, a chapter, a benchmark, and pages that use them."
    cell = '{"cells": [{"cell_type": "code", "source": ["%s"]}]}'
    files = {"sparse_nb/core/exact.py": "", "sparse_nb/__init__.py": "_FUNCTIONS = {'delta': ('delta_prefill',)}",
             "sparse_nb/core/registry.py": 'METHODS = {"delta": Entry("sparse_nb.delta:Delta", "x")}',
             "nbs/95_cli.ipynb": "from sparse_nb import Delta",
             "nbs/70_hf.ipynb": "from sparse_nb import delta_prefill",
             "sparse_nb/delta.py": "from .core.exact import attention",
             "benchmarks/prefill.py": "import sparse_nb.delta", "README.md": "",
             "nbs/04_exact.ipynb": "#| default_exp core.exact", "nbs/10_delta.ipynb": "#| default_exp delta",
             "nbs/31_more.ipynb": "%time\\nfrom sparse_nb.delta import x", "nbs/03_plots.ipynb": "import numpy",
             "nbs/80_bench.ipynb": "def f():\\n    from benchmarks import prefill"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(cell % text if name.endswith("ipynb") else text)
    run = lambda *words: subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    run("init", "-b", "main")
    for name, value in (("user.name", "a"), ("user.email", "a@b.c")): run("config", name, value)
    tmp_path.joinpath(".gitignore").write_text("ignored\n")
    run("add", "-A")
    run("commit", "-m", "first")
    return tmp_path, run


@pytest.mark.parametrize("what, more", [
    ("README.md", []), ("nbs/03_plots.ipynb", ["nbs/03_plots.ipynb"]),
    ("benchmarks/prefill.py", ["nbs/80_bench.ipynb"]),
    ("sparse_nb/delta.py", ["nbs/31_more.ipynb", "nbs/70_hf.ipynb", "nbs/80_bench.ipynb", "nbs/95_cli.ipynb"]),
    ("nbs/04_exact.ipynb", ["nbs/04_exact.ipynb", "nbs/31_more.ipynb", "nbs/70_hf.ipynb", "nbs/80_bench.ipynb",
                            "nbs/95_cli.ipynb"])])
def test_notebooks_that_a_change_can_break(project, what, more):
    root, _ = project
    assert changed.notebooks({what}, root) == sorted(["nbs/10_delta.ipynb", *more])


@pytest.mark.parametrize("what, asked", [
    ("README.md", False), ("sparse_nb/delta.py", False), ("nbs/10_delta.ipynb", False), ("kernels/santa.ipynb", True),
    ("sparse_nb/kernels/santa.py", True), ("nbs/04_exact.ipynb", True), ("sparse_nb/core/exact.py", True),
    ("tests/kernels/test_blocks.py", True), ("tests/core/test_random.py", False)])
def test_kernels_are_tried_where_a_change_can_break_them(project, what, asked):
    assert changed.kernels({what}, project[0]) == asked


@pytest.mark.parametrize("what, asked", [
    ("README.md", True), ("nbs/10_delta.ipynb", True), ("tools/site/conf.py", True), ("constraints.txt", True),
    ("sparse_nb/delta.py", False), ("tests/core/test_random.py", False), ("benchmarks/results/x.json", False)])
def test_pages_are_tried_where_a_change_can_break_them(what, asked): assert changed.site({what}) == asked


def test_what_is_not_committed_and_what_a_branch_committed(project, monkeypatch):
    monkeypatch.delenv("BASE", raising=False)
    root, run = project
    assert changed.changed_files(root=root) == set()
    (root / "README.md").write_text("new")
    (root / "ignored").write_text("")
    (root / "nbs/new page.ipynb").write_text("")
    assert changed.changed_files(root=root) == {"README.md", "nbs/new page.ipynb"}
    run("checkout", "-b", "other")
    run("commit", "-am", "second")
    assert changed.changed_files(root=root) == {"README.md", "nbs/new page.ipynb"}
    run("checkout", "main")
    run("merge", "other")
    assert changed.changed_files(root=root) == {"nbs/new page.ipynb"}
    monkeypatch.setenv("BASE", "HEAD~1")
    assert changed.changed_files(root=root) == {"README.md", "nbs/new page.ipynb"}


def test_without_git_nothing_changed(tmp_path): assert changed.changed_files(root=tmp_path) == set()


def test_the_chapters_are_there(): assert {*changed.notebooks(set())} == changed.CHAPTERS


def test_the_tests_inside_vllm_run_where_what_they_are_about_has_changed(tmp_path, capsys):
    files = {"sparse_nb/vllm/serving.py": "a = 1", "tests/vllm/engine.py": "", "tests/vllm/test_engine.py": "",
             "sparse_nb/kernels/common.py": "class PageTable: pass\nb = 1\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert changed.say_vllm(tmp_path) and "tests/vllm/test_engine.py" in capsys.readouterr().out
    (tmp_path / changed.PASSED).write_text(json.dumps(changed.inside_vllm(tmp_path)))
    (tmp_path / "sparse_nb/kernels/common.py").write_text("class PageTable: pass\nb = 2\n")
    assert not changed.say_vllm(tmp_path) and "are skipped: " in capsys.readouterr().out
    (tmp_path / "sparse_nb/kernels/common.py").write_text("class PageTable: c = 1\n")
    (tmp_path / "sparse_nb/vllm/paged.py").write_text("")
    assert changed.not_passed(tmp_path) == ["sparse_nb/kernels/common.py: PageTable", "sparse_nb/vllm/paged.py"]
    (tmp_path / "sparse_nb/vllm/serving.py").unlink()
    assert "sparse_nb/vllm/serving.py" in changed.not_passed(tmp_path)
