"""The ledger: every claim that is due has a row, every row stands in its chapter, and no row says more than its
numbers.
"""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from execnb.nbio import mk_cell, new_nb, read_nb, write_nb

from sparse_nb.claims import KINDS, VERDICTS, Claim, Row, claim, claims, failures, ledger, missing, rows, table

ROOT = Path(__file__).parents[2]
GOOD = {"id": "SANTA-7", "verdict": "reproduced", "paper": [49.9, 79.95], "ours": [50.01, 80.02], "tolerance": 0.3}
KIND_OF = {"theorem": "WALK-4", "number": "SANTA-7", "models": "SANTA-6", "machine": "SANTA-18"}  # a claim of each


def claimed(nb):
    "The ids that the cells of `nb` claim, directly or through a function of theirs."
    calls = [node for cell in nb.cells if cell.cell_type == "code"
             for node in ast.walk(ast.parse(re.sub(r"^[%!].*", "", cell.source, flags=re.M)))
             if isinstance(node, ast.Call)]
    return {call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)
            and call.args[0].value in claims()}


def shown(nb):
    "The Markdown outputs of `nb`."
    return {"".join(o.data["text/markdown"]).strip() for cell in nb.cells if cell.cell_type == "code"
            for o in cell.outputs if "text/markdown" in o.get("data", {})}


def write(folder, name="SANTA-7", **changes):
    (folder / f"{name}.json").write_text(json.dumps(GOOD | changes))


# The committed ledger.

def test_no_claim_that_is_due_lacks_its_row():
    assert missing() == [], "run the chapter with tools/book.py execute"


def test_every_id_of_the_first_methods_is_a_claim():
    assert {*(f"SANTA-{i}" for i in range(1, 19)), "VATT-7", *(f"OURS-{i}" for i in range(1, 8))} <= claims().keys()


@pytest.mark.parametrize("chapter", sorted({said.chapter for said in claims().values() if said.chapter}))
def test_rows_are_those_of_the_executed_chapter(chapter):
    nb, there = read_nb(ROOT / chapter), {id: row for id, row in rows().items() if claims()[id].chapter == chapter}
    assert claimed(nb) == there.keys()
    assert [id for id, row in there.items() if row._repr_markdown_()
            .strip() not in shown(nb)] == [], "the chapter shows other rows than nbs/claims holds"


@pytest.mark.parametrize("view", [ledger, failures])
def test_the_last_chapter_shows_this_ledger(view):
    assert view().strip() in shown(read_nb(ROOT / "nbs/appendix/ledger.ipynb")), "run nbs/appendix/ledger.ipynb last"


def cannot_fail(found):
    "The ids of rows that no tolerance and no sentence, of two words or more, could have upset."
    return [id for id, row in found.items() if not any(len(x.split()) > 1 for x in row.fails_unless())]


def test_every_row_could_have_failed_and_the_last_chapter_says_on_what():
    assert cannot_fail(rows()) == []
    page = failures().splitlines()[2:]
    assert len(page) == len(claims())
    for line, (id, row) in zip(page, rows().items()):
        assert line.startswith(f"| [{id}](") and line.count("<br>") == len(row.fails_unless()) - 1 and "| 1. " in line


def test_a_row_that_nothing_could_upset_is_seen(monkeypatch):
    monkeypatch.setattr("sparse_nb.claims._check_evidence", lambda row: None)
    monkeypatch.setattr("sparse_nb.claims._check_kind", lambda row: None)
    bare = [Row("SANTA-7", verdict, paper=1.5, ours="a number", note="NO: it is not so", command="make bench", checks=x)
            for verdict in VERDICTS if verdict != "reproduced" for x in (None, {}, {"x": True})]
    assert all(cannot_fail({"SANTA-7": row}) == ["SANTA-7"] for row in bare)
    assert cannot_fail({"SANTA-7": Row(**GOOD)}) == []


# What the ledger refuses.

@pytest.mark.parametrize("name, changes, why", [
    ("SANTA-7", {"ours": [50.01, 81.02]}, "'reproduced' is refused, ours differs from the paper by 1.07, "
     "allowed is 0.3"),
    ("SANTA-7", {"tolerance": 0.01}, "allowed is 0.01"),
    ("SANTA-7", {"checks": {"all lengths were tried": False}}, "it is not true that all lengths were tried"),
    ("SANTA-7", {"verdict": "not here", "command": "make bench", "tolerance": None,
                 "checks": {"it is so": True, "so is that": False}}, "it is not true that so is that"),
    ("SANTA-7", {"verdict": "holds", "tolerance": None, "checks": {"it is so": True}}, "a claim of the kind 'number'"),
    ("SANTA-7", {"verdict": "holds", "tolerance": None}, "checks must hold a sentence that was checked"),
    ("SANTA-7", {"verdict": "not here", "tolerance": None}, "command must name what would measure it"),
    ("SANTA-7", {"verdict": "not here", "tolerance": None, "command": "make bench"},
     "checks must hold a sentence that was checked for 'not here'"),
    ("SANTA-7", {"verdict": "not here", "tolerance": None, "command": "make bench", "checks": {"it is level": False}},
     "it is not true that it is level"),
    ("SANTA-7", {"verdict": "plausible"}, "verdict must be one of"),
    ("SANTA-7", {"proof": "obvious"}, "proof"),
    ("SANTA-8", {}, "holds the result of SANTA-7"),
    ("SANTA-70", {"id": "SANTA-70"}, "id must be one of"),
    ("TOY-1", {"id": "TOY-1"}, "name its chapter"),
])
def test_false_rows_are_not_read(tmp_path, monkeypatch, name, changes, why):
    monkeypatch.setitem(claims(), "TOY-1", Claim("a toy", "It is so.", None, "theorem"))  # not due
    write(tmp_path)
    assert (rows(tmp_path) == {"SANTA-7": Row(**GOOD)} and "SANTA-7" not in missing(tmp_path)
            and "TOY-1" not in missing(tmp_path))
    write(tmp_path, name, **changes)
    for read in rows, missing, table, ledger:
        with pytest.raises(ValueError, match=f"(?s)^{name}.json: .*{re.escape(why)}"): read(tmp_path)


@pytest.mark.parametrize("changes, error, why", [
    ({"id": "SANTA"}, ValueError, "id must be one of"), ({"verdict": None}, ValueError, "verdict must be one of"),
    ({"ours": float("inf")}, ValueError, "ours must be finite"),
    ({"ours": []}, ValueError, "ours must hold at least one"), ({"ours": [[1.0], [2.0]]}, TypeError, "ours must be"),
    ({"ours": None}, TypeError, "ours must be"), ({"ours": {1.0}}, TypeError, "ours must be"),
    ({"paper": " "}, ValueError, "paper must not be empty"),
    ({"ours": [1, 2, 3]}, ValueError, "as many numbers as paper, 2, got 3"),
    ({"tolerance": None}, ValueError, "tolerance must be the largest difference allowed"),
    ({"tolerance": -1}, ValueError, "tolerance must not be negative"),
    ({"tolerance": "small"}, TypeError, "tolerance must be"), ({"note": 3}, TypeError, "note must be a str"),
    ({"checks": ["yes"]}, TypeError, "checks must be a dict"),
    ({"checks": {"yes": "yes"}}, TypeError, "checks must map to bool"),
    ({"checks": {"": True}}, ValueError, "sentence"),
    ({"command": ""}, ValueError, "command must not be empty"),
])
def test_incomplete_rows_cannot_be_made(changes, error, why):
    with pytest.raises(error, match=why): Row(**GOOD | changes)


def test_numbers_of_arrays_and_tensors_are_kept_as_plain_ones():
    import numpy as np
    import torch
    row = Row("SANTA-7", "reproduced", paper=np.array([1 / 3, 2]), ours=torch.tensor([1 / 3, 2.0], dtype=torch.float64),
              tolerance=np.float64(0), checks={"equal": np.bool_(True), "finite": torch.tensor(True)})
    assert row.contradiction() is None and row.paper == [0.333333, 2.0] == row.ours
    assert Row(**json.loads(row.to_json())) == row
    assert Row("SANTA-6", "same shape", paper="falls", ours=[np.float32(0.5), 1],
               checks={"it falls": True}).ours == [0.5, 1]


def test_equal_to_the_tolerance_is_within_it():
    assert Row("SANTA-7", "reproduced", paper=49.9, ours=50.2, tolerance=0.3).contradiction() is None
    assert Row("SANTA-7", "reproduced", paper=49.9, ours=50.2001, tolerance=0.3).contradiction()


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_row_shows_its_evidence(verdict, monkeypatch):
    monkeypatch.setattr("sparse_nb.claims._check_kind", lambda row: None)
    evidence = dict(tolerance=0.3) if verdict == "reproduced" else dict(checks={"a | b": True})
    if verdict == "not here": evidence["command"] = "make bench"
    text = Row("SANTA-18", verdict, paper=1.5, ours=1.6, note="one GPU", **evidence)._repr_markdown_()
    for part in (verdict, "SANTA, Fig. 4", "1.5", "1.6", "one GPU",
                 "0.1, allowed 0.3" if verdict == "reproduced" else "a \\| b",
                 "`make bench`" if verdict == "not here" else ""):
        assert part in text


# Which verdicts a kind of claim can get.

def evidence(id, verdict, named=True):
    "All that `verdict` could ask of a row of `id`; its refutation in a check, if `named`."
    name = (claims()[id].refuted_by or ": an example").split(": ", 1)[1]
    return dict(id=id, verdict=verdict, paper=1.0, ours=1.0, checks={name if named else "it is so": True},
                tolerance=0.1 if verdict == "reproduced" else None, command="make bench")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_kind_has_its_verdicts_and_no_others(kind, verdict):
    assert claims()[KIND_OF[kind]].kind == kind
    if verdict in KINDS[kind] and (verdict, kind) != ("corrected", "number"):
        assert Row(**evidence(KIND_OF[kind], verdict)).contradiction() is None
    else:
        with pytest.raises(ValueError, match=f"{KIND_OF[kind]}.*kind '{kind}', got "):
            Row(**evidence(KIND_OF[kind], verdict))


def test_the_rule_is_the_table_of_the_chapter():
    cells = read_nb(ROOT / "nbs/appendix/ledger.ipynb").cells
    page = "".join(cell.source for cell in cells if cell.cell_type == "markdown")
    lines = {kind: re.search(rf"^\| `{kind}` \|.*\|(.*)\|$", page, flags=re.M)[1] for kind in KINDS}
    assert {kind: tuple(re.findall("`(.*?)`", line)) for kind, line in lines.items()} == KINDS
    assert not {"holds", "reproduced"} & {*KINDS["models"], *KINDS["machine"]}


@pytest.mark.parametrize("id, verdict, changes, named, why", [
    ("OURS-5", "same shape", {"tried_on": ()}, True, "tried_on of OURS-5 in claims.yml must name what .* none"),
    ("WALK-11", "same shape", {"tried_on": ()}, True, "tried_on of WALK-11 "),
    ("WALK-4", "corrected", {"refuted_by": None}, True, "must name a proof or a counterexample .* 'theorem', got None"),
    ("WALK-4", "corrected", {}, False, "checks of WALK-4 must name its counterexample"),
    ("SANTA-6", "corrected", {}, False, "checks, ours or note of SANTA-6 must name its proof"),
    ("SANTA-6", "corrected", {"refuted_by": "counterexample: ours is -1"}, True, "must name a proof for .*'models'"),
])
def test_models_and_refutations_have_names(monkeypatch, id, verdict, changes, named, why):
    row = evidence(id, verdict)
    assert Row(**row).contradiction() is None
    wrong = Claim(**{**vars(claims()[id]), **changes})
    if named: monkeypatch.setitem(claims(), id, wrong)
    with pytest.raises(ValueError, match=why): Row(**(row if named else evidence(id, verdict, named=False)))


@pytest.mark.parametrize("changes, why", [
    ({"kind": "law"}, "kind must be one of theorem, number, models, machine, got 'law'"),
    ({"refuted_by": "proof"}, "refuted_by must be 'proof: ' or"), ({"refuted_by": "we: say so"}, "refuted_by must be"),
    ({"tried_on": "pocket"}, "tried_on must hold names"), ({"tried_on": ["pocket", " "]}, "tried_on must hold names"),
])
def test_claims_are_of_a_kind(changes, why):
    with pytest.raises(ValueError, match=why): Claim(**{**vars(claims()["SANTA-6"]), **changes})


def test_ours_follow_the_rule_of_the_papers():
    ours = {id: row.verdict for id, row in rows().items() if id.startswith("OURS")}
    assert {id for id, verdict in ours.items() if verdict == "holds"} == {
        id for id in ours if claims()[id].kind == "theorem"} == {"OURS-1", "OURS-3"}


# Where rows come from.

def test_a_claim_is_written_only_while_the_book_is_made(tmp_path, monkeypatch):
    monkeypatch.delenv("SPARSE_NB_LEDGER", raising=False)
    monkeypatch.chdir(tmp_path)
    row = claim(**GOOD)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("SPARSE_NB_LEDGER", str(tmp_path / "nbs" / "claims"))
    assert claim(**GOOD) == row and rows(tmp_path / "nbs" / "claims") == {"SANTA-7": row}
    with pytest.raises(AssertionError, match="allowed is 0.3"): claim(**GOOD | {"ours": [49.9, 90]})
    assert rows(tmp_path / "nbs" / "claims") == {"SANTA-7": row}


def test_executing_a_chapter_writes_its_rows(tmp_path):
    (tmp_path / "nbs").mkdir()
    shutil.copy(ROOT / "settings.ini", tmp_path)
    nb = new_nb([mk_cell("from sparse_nb.claims import claim"), mk_cell("claim(**" + repr(GOOD) + ")")])
    write_nb(nb, tmp_path / "nbs/10_toy.ipynb")
    env = {name: value for name, value in os.environ.items() if name != "SPARSE_NB_LEDGER"} | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, ROOT / "tools/book.py", "execute", "nbs/10_toy.ipynb"], cwd=tmp_path,
                   env=env, check=True)
    assert rows(tmp_path / "nbs/claims") == {"SANTA-7": Row(**GOOD)}
    assert shown(read_nb(tmp_path / "nbs/10_toy.ipynb")) == {Row(**GOOD)._repr_markdown_().strip()}


def test_import_is_cheap():
    code = ("import sys, sparse_nb.claims\n"
            "assert not {'torch', 'pandas', 'numpy', 'matplotlib', 'yaml'} & sys.modules.keys()")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
