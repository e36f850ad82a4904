"Settings that methods no longer have, and what is stored of them: `core.settings.GONE`"
import json
from dataclasses import fields, replace

import pytest

from sparse_nb import Method, TopK
from sparse_nb.core.registry import CLASSES, method_class
from sparse_nb.core.settings import GONE, GoneSetting, present, read_method
from sparse_nb.grid import Grid, frame_of, run
from sparse_nb.results import read_results
from benchmarks import table
from commands import one_line, run as command
from models import save_llama

SETTINGS = [(name, setting) for name, gone in GONE.items() for setting in gone]
NEEDED = dict(Then=dict(values="Santa()"))  # settings without a default


def default(name): return method_class(name)(**{x: read_method(y) for x, y in NEEDED.get(name, {}).items()})


def stored(name, setting, **more):
    "A method by default as it was stored, its value of today first among those of the setting that is gone."
    settings = json.loads(default(name).to_json()) | more
    held = GONE[name][setting].held
    return settings, (held(settings) if callable(held) else held)


@pytest.mark.parametrize("name, setting", SETTINGS)
def test_a_setting_is_gone_and_its_value_of_today_is_read(name, setting):
    method = default(name)
    settings, held = stored(name, setting)
    assert setting not in {f.name for f in fields(method)} and held
    for value in held:
        old = settings | {setting: value}
        assert Method.from_json(json.dumps(old)) == method and present(old) == settings
        text = repr(method)[:-1] + ", " * bool(fields(method)) + f"{setting}={value!r})"
        assert read_method(text, stored=True) == method
        with pytest.raises(GoneSetting, match=f"^{name} no longer has the setting '{setting}': .*, in "):
            read_method(text)


@pytest.mark.parametrize("name, setting", SETTINGS)
def test_another_value_is_no_method_of_today(name, setting):
    settings, _ = stored(name, setting)
    old, instead = settings | {setting: "another"}, GONE[name][setting].instead
    for read in (Method.from_json, lambda text: table.meant(json.loads(text), "decode")):
        with pytest.raises(GoneSetting) as error: read(json.dumps(old))
        assert str(error.value) == f"{name} no longer has the setting {setting!r}, which was 'another': {instead}"
    around = dict(method="Then", keys=json.loads(TopK().to_json()), values=old)  # a method among the settings of one
    with pytest.raises(GoneSetting, match=f"{name} no longer has the setting '{setting}', which was 'another'"):
        present(around)


def test_every_setting_says_in_a_line_what_to_use():
    assert GONE.keys() <= CLASSES.keys()
    for gone in GONE.values():
        for x in gone.values(): assert x.instead and "\n" not in x.instead and len(x.instead) < 120


def test_the_command_says_what_to_use(tmp_path):
    (prompt := tmp_path / "prompt").write_text("Who is there?")
    for words in ("generate", "--prompt-file", prompt), ("eval", "--tasks", "kv", "--out", tmp_path / "x.jsonl"):
        one_line(command(*words, "--decode", "VAttention(replacement=False)"),
                 "--decode: VAttention no longer has the setting 'replacement': no key is drawn twice, in ")


def test_a_file_of_results_goes_on_where_only_settings_are_gone_and_is_refused_where_they_had_another_value(tmp_path):
    out, method = tmp_path / "out.jsonl", method_class("VAttention")(sinks=4, window=4)
    grid = Grid(save_llama(tmp_path / "tiny"), ["kv"], [150], {"mine": method}, prompts=1, batch=400)
    run(grid, out)
    header, *jobs = out.read_text().splitlines()
    for value in False, True:
        old = json.loads(header)
        old["decode"]["mine"]["replacement"] = value
        out.write_text("\n".join([json.dumps(old), *jobs]) + "\n")
        before = out.read_bytes()
        if not value:
            assert run(replace(grid, prompts=2), out) == (1, 0) and len(read_results(out)[1]) == len(jobs) + 1
        else:
            with pytest.raises(ValueError, match="by the decode 'mine': VAttention no longer has the setting "
                                                 "'replacement', which was True: no key is drawn twice, in .*out"):
                run(replace(grid, prompts=2), out)
            assert out.read_bytes() == before
        shown = command("eval", "--show", out)  # answers are shown by the name of their method, whatever it was
        assert shown.returncode == 0 and "mine" in shown.stdout and {*frame_of(out).decode} == {"exact", "mine"}


def test_the_table_leaves_out_what_is_gone_and_says_so(monkeypatch):
    kept, gone = (dict(method="VAttention", replacement=x) for x in (False, True))
    parts = [("a record", dict(meta={}), "decode", ["m"], dict(kept=kept, gone=gone, other=None), [], [])]
    for name in "_real_model", "_grid": monkeypatch.setattr(table, name, lambda *given: [])
    monkeypatch.setattr(table, "_answers", lambda: parts)
    monkeypatch.setattr(table, "_paper_tables", lambda: [])
    monkeypatch.setattr(table, "_every", table._every.__wrapped__)
    assert [(x.name, x.settings) for x in table.every()] == [("kept", dict(method="VAttention"))]
    assert table.left_out() == {"a record": {"gone": "VAttention no longer has the setting 'replacement', which was "
                                                     "True: no key is drawn twice"}}
    assert isinstance(table._settings("VAttention(replacement=True)"), GoneSetting)
    assert table._settings("nobody") is None
    assert table._settings("VAttention(replacement=False)") == json.loads(method_class("VAttention")().to_json())
