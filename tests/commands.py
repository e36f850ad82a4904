"The command in this process, and how it says what is wrong"
import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout

import pytest

from sparse_nb.cli import main


def run(*args):
    "Exit code, standard output and standard error of the command, in this process."
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stop: main([*map(str, args)])
    return subprocess.CompletedProcess(args, stop.value.code, out.getvalue(), err.getvalue())


def one_line(result, *words):
    assert result.returncode == 2, result
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("sparse-nb: "), result.stderr
    for word in words: assert word in result.stderr, (word, result.stderr)
