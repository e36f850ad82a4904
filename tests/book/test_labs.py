"""The labs of the course: solved, every check says "right"; as handed out, and with a wrong answer, what is wrong."""
import ast
import io
import math
import re
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from execnb.nbio import read_nb

from wrong_answers import WRONG

COURSE = Path(__file__).parents[2] / "nbs" / "course"


def sources(text):
    "Name -> source, of the functions and variables that a file or cell defines."
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef): name = node.name
        elif isinstance(node, ast.Assign): name = getattr(node.targets[0], "id", None)
        else: continue
        first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])
        found[name] = "\n".join(text.splitlines()[first - 1:node.end_lineno]) + "\n"
    return found


def solutions(n): return sources((COURSE / f"solutions/lab_{n}.py").read_text(encoding="utf-8"))


def wrong_versions(n):
    "(name, wrong source, words of what the check must say) for each wrong answer of a lab."
    solved = solutions(n)
    for name, changes in WRONG[n].items():
        for old, new, words in changes:
            assert old in solved[name], f"{name} has no {old!r}"
            yield name, solved[name].replace(old, new), words


def tasks(n):
    "The code cells of a lab: those that prepare, and name -> (the student's cell, the cell with its check)."
    code, solved, found, before = [], solutions(n), {}, []
    for cell in read_nb(COURSE / f"lab_{n}.ipynb").cells:
        if cell.cell_type == "code": code.append(cell.source)
    for cell, after in zip(code, [*code[1:], ""]):
        if mine := [name for name in sources(cell) if name in solved]: found[mine[0]] = cell, after
        elif not cell.startswith("check."): before.append(cell)
    return before, found


def said_in_lab(n):
    "What the checks of a lab print: as handed out, solved, and for each wrong answer, by tasks."
    from execnb.shell import CaptureShell
    from fastcore.xtras import working_directory
    before, found = tasks(n)
    shell = CaptureShell(COURSE / f"lab_{n}.ipynb")

    def run(cell):
        out = shell.run(cell)
        errors = [x for x in out if x["output_type"] == "error"]
        if errors: raise RuntimeError(f"{cell}\n{errors}")
        return "".join("".join(x.get("text", "")) for x in out if x.get("name") == "stdout").strip()

    with working_directory(COURSE), redirect_stderr(io.StringIO()):
        for cell in before: run(cell)
        solved = solutions(n)
        check = lambda name, source: (run(source), run(found[name][1]))[1]
        handed_out = {name: check(name, cell) for name, (cell, _) in found.items()}
        right, wrong = {name: check(name, solved[name]) for name in found}, []
        for name, source, words in wrong_versions(n):
            wrong.append((name, words, check(name, source)))
            run(solved[name])
        return {"handed out": handed_out, "solved": right, "wrong": wrong}


@pytest.fixture(scope="module")
def said(forked):
    "`said(n)`: what the checks of lab n print; the lab runs once, in a process of its own."
    known = {}

    def of(n):
        if n not in known: known[n] = forked(said_in_lab, n)
        return known[n]
    return of


labs = pytest.mark.parametrize("n", WRONG)
pytestmark = pytest.mark.budget(25)  # the first test of a lab runs it


@labs
def test_a_lab_is_whole(n):
    before, found = tasks(n)
    assert found.keys() == solutions(n).keys() == WRONG[n].keys() and 5 <= len(found) <= 6
    for name, (cell, check) in found.items():
        assert re.fullmatch(rf"check\.\w+\({name}(, \w+)*\)", check), check
        assert "your code" in cell or name in ("supported", "_scores"), cell
    cells = read_nb(COURSE / f"lab_{n}.ipynb").cells
    minutes = re.findall(r"^## \d\. .* \((\d+) minutes\)$", "\n".join(x.source for x in cells), re.M)
    assert len(minutes) == len(found) and 45 <= sum(map(int, minutes)) <= 60


@labs
def test_a_solved_lab_passes_every_check(said, n):
    assert all(x.startswith("right") for x in said(n)["solved"].values()), said(n)["solved"]


@labs
def test_a_lab_as_handed_out_passes_none(said, n):
    assert all(x.startswith("not yet: ") for x in said(n)["handed out"].values()), said(n)["handed out"]
    cells = [x for x in read_nb(COURSE / f"lab_{n}.ipynb").cells if x.source.startswith("check.")]
    saved = ["".join("".join(out["text"]) for out in x.outputs).strip() for x in cells]
    assert saved == [*said(n)["handed out"].values()]  # what the page shows


@labs
def test_wrong_answers_are_told_what_is_wrong(said, n):
    missed = [(name, words, x) for name, words, x in said(n)["wrong"] if not x.startswith("not yet: ") or words not in x
              or re.search(r"Error|the code stopped", x)]
    assert not missed and len(said(n)["wrong"]) >= 3 * len(WRONG[n])


def test_right_answers_in_another_style_are_right(monkeypatch, capsys):
    "Lists, plain numbers and loops where the solutions have tensors."
    monkeypatch.syspath_prepend(COURSE)
    from checks import lab_1, lab_2, lab_3, lab_4, lab_6

    def merge(a, b):
        largest = max(a[0], b[0])
        x, y = math.exp(a[0] - largest), math.exp(b[0] - largest)
        return [largest, a[1] * x + b[1] * y, a[2] * x + b[2] * y]

    def thresholds(scheme, u):
        number = {"iid": lambda j: u[j], "stratified": lambda j: (j + u[j]) / 4, "systematic": lambda j: (j + u[0]) / 4}
        return [float(number[scheme](j)) for j in range(4)]

    def pick(p, x):
        return [min(int((p.cumsum(0) <= t).sum()), len(p) - 1) for t in x]

    def allot(mass, count, budget):
        taken = [0] * len(mass)
        for c in sorted(range(len(mass)), key=lambda c: -float(mass[c] / count[c])):
            taken[c] = min(int(count[c]), budget - sum(taken))
        return taken

    def paired(gains):
        more = [*gains, 1, -1]
        half = scipy.stats.t.isf(0.025, len(gains) + 1) * np.std(more) / len(more) ** 0.5
        return np.clip(np.mean(more) + half * np.array([-1, 1]), -1, 1)
    lab_1.merge(merge)
    lab_2.thresholds(thresholds)
    lab_2.pick(pick)
    lab_2.hostile(lambda n, samples: [float(i % (n // samples)) for i in range(n)])
    lab_3.unseen(lambda n, large, base: math.prod((n - large - i) / (n - i) for i in range(base)))
    lab_4.allot(allot)
    lab_6.paired(paired, {"none": np.zeros(30)})
    lab_6.verdict(lambda low, high, margin: "alike" if max(-low, high) < margin else "better" if low > 0 else
                  "worse" if high < 0 else "unknown")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 8 and all(x.startswith("right") for x in said), said


def test_an_error_of_the_student_is_shown_with_its_line(monkeypatch, capsys):
    monkeypatch.syspath_prepend(COURSE)
    from checks import NotYet, check, lab_3

    def unseen(n, large, base):
        "Not a fraction."
        return base / (n - n)
    lab_3.unseen(unseen)
    assert "the code stopped at `return base / (n - n)`: ZeroDivisionError" in capsys.readouterr().out
    lab_3.unseen(lambda *_: None)
    assert "returns nothing yet" in capsys.readouterr().out
    lab_3.unseen(lambda *_: "0.5x")
    assert "must be a number or a tensor, got str" in capsys.readouterr().out

    @check
    def broken(answer): raise NotYet(answer)
    broken("why")
    assert capsys.readouterr().out == "not yet: why\n"
