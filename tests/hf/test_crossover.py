"""From how many keys on a method is faster: the table that ships against the records, and what it says of settings."""
import json

import pytest
import torch

from sparse_nb.hash_attention import HashAttention
from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.quest import Quest
from sparse_nb import Exact
from sparse_nb.core.registry import method_class
from sparse_nb.crossover import CROSSOVERS, _at_most, _holds, crossover_keys, first_win
from benchmarks.recorder import recorded
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa
from sparse_nb.sketch_walk import SketchWalk
from sparse_nb.vattention import VAttention

H200 = "NVIDIA H200"
CLEAR = 1.05  # less is no win
DENSE = "sdpa_cudnn", "sdpa_flash", "flashinfer", "flashinfer_tc", "flex", "exact"
OWN = {  # the rows of a whole step with the settings of a row of the table
    "decode": lambda x, own: x["method"] == f"santa_{own.settings['scheme']}" and x["samples"] == own.most["samples"],
    "vattention_launches": lambda x, own: x["method"] == "vattention" and x["launch"] == "merge"
    and x["density"] == own.density,
    "saap_launches": lambda x, own: x["method"] == "saap" and x["launch"] == "merge",
    "sketch_walk_launches": lambda x, own: x["method"] == "sketch_walk" and x["launch"] == "merge"
    and (x["index"], x["block"], x.get("heads", "group")) == tuple(own.settings[y] for y in ("index", "block", "heads"))
    and x["asked"] == own.most["density"],
    "choose": lambda x, own: x["method"] == own.method and x["launch"] == "attend"}


def lost(own):
    "Lengths at which a whole model with a method of a row was not clearly faster with it in both last runs."
    record, last, found = recorded("generate")[own.gpu], {}, set()
    for x in (*record["meta"]["replaced"], *record["rows"]):
        whole = x.get("tuned") and (x["batch"], x.get("gpus", 1)) == (1, 1) and x.get("method") and x.get("ratio")
        have = json.loads(x["method"]) if whole else {}
        if have.get("method") != own.method or not (_holds(own.settings, have) and _at_most(own.most, have)): continue
        if own.density is None or x["density"] <= own.density:
            last[x["way"], x["n"]] = (*last.get((x["way"], x["n"]), ())[-1:], x["ratio"])
    for (_, n), ratios in last.items():
        if min(ratios) <= CLEAR: found.add(n)
    return found


@pytest.mark.parametrize("own", CROSSOVERS, ids=lambda x: f"{x.method}-{x.keys}")
def test_the_table_is_what_the_records_say(own):
    rows = [x for x in recorded(own.record)[own.gpu]["rows"]
            if (x.get("B", 1), x.get("H", 32), x.get("memory", "device"), x.get("mode", "graph"))
            == (1, 32, "device", "graph")]
    dense = [x for x in rows if x["method"] in DENSE]
    exact = {n: min(x["median_us"] for x in dense if x["n"] == n) for n in {x["n"] for x in rows}}
    slow = lost(own)
    times = {x["n"]: (float("inf") if x["n"] in slow else CLEAR * x["median_us"], exact[x["n"]])
             for x in rows if OWN[own.record](x, own)}
    assert len(times) > 1 and own.keys in times
    assert all(times[n][0] < times[n][1] for n in times if n >= own.keys)
    shorter = [n for n in times if n < own.keys]
    if shorter: assert times[max(shorter)][0] >= times[max(shorter)][1]
    assert first_win(times) == own.keys


@pytest.mark.parametrize("method, lengths, keys", [
    ("Quest", {32768, 131072}, 524288), ("HashAttention", {32768, 131072}, 524288), ("Adamas", {32768, 131072}, 524288),
    ("SketchWalk", {32768}, 131072)])
def test_where_a_model_won_nothing_its_kernels_have_not_won(method, lengths, keys):
    own = next(x for x in CROSSOVERS if x.method == method)
    assert own.keys == keys and lost(own) == lengths


@pytest.mark.parametrize("method", ["DoubleSparsity"])
def test_a_way_that_nowhere_wins_clearly_is_not_in_the_table(method):
    rows = recorded("choose")[H200]["rows"]
    dense = [x for x in rows if x["method"] in DENSE]
    times = {x["n"]: (CLEAR * x["median_us"], min(y["median_us"] for y in dense if y["n"] == x["n"])) for x in rows
             if x["method"] == method and x["launch"] == "attend"}
    assert len(times) == 3 and first_win(times) is None and method not in {x.method for x in CROSSOVERS}


@pytest.mark.parametrize("own", CROSSOVERS, ids=lambda x: f"{x.method}-{x.keys}")
def test_the_table_speaks_of_settings_that_exist(own):
    given = json.loads(method_class(own.method)().to_json())
    assert {*own.settings, *own.most} <= {*given}


@pytest.mark.parametrize("times, want", [
    ({}, None), ({8: (1, 2)}, 8), ({8: (2, 2)}, None), ({8: (1, 2), 16: (3, 2)}, None),
    ({16: (1, 2), 8: (3, 2)}, 16), ({8: (1, 2), 16: (3, 2), 32: (1, 2), 64: (1, 2)}, 32),
    ({8: (float("nan"), 2), 16: (1, 2)}, 16), ({8: (1, 2), 16: (float("nan"), 2)}, None)])
def test_first_win(times, want): assert first_win(times) == want


@pytest.mark.parametrize("method, density, want", [
    (Santa(), None, 4096), (Santa(samples=1), None, 4096), (Santa(samples=129), None, None),
    (Santa(scheme="proportional"), None, 32768), (Santa(scheme="proportional", tile=64), None, None),
    (Santa(scheme="stratified"), None, None), (Santa(eps=0.1, delta=0.1), None, None),
    (Saap(), None, 171008), (Saap(budget=0.044), 0.5, 171008), (Saap(budget=0.045), None, None),
    (Saap(budget=100), None, None), (Saap(probes=3), None, None), (Saap(clusters=2048), None, None),
    (SketchWalk(), None, 131072), (SketchWalk(density=0.01), None, 32768), (SketchWalk(density=0.21), None, None),
    (SketchWalk(block=32), None, None), (SketchWalk(index="mean"), None, None),
    (SketchWalk(heads="each", density=0.1), None, 131072), (SketchWalk(heads="each", density=0.05), None, 131072),
    (SketchWalk(heads="each", density=0.11), None, None), (SketchWalk(heads="each"), None, None),
    (SketchWalk(heads="all", density=0.1), None, None),
    (VAttention(predictor=HashAttention()), 0.1, 131072), (VAttention(predictor=HashAttention()), 0.11, None),
    (VAttention(predictor=HashAttention()), None, None), (VAttention(predictor=Quest()), 0.05, None),
    (VAttention(), 0.05, None), (VAttention(predictor=HashAttention(), share=False), 0.05, None),
    (Exact(), None, None), (Quest(), None, 524288), (Quest(0.05), None, 524288), (Quest(0.11), None, None),
    (Quest(budget=819), None, None), (Quest(page=32), None, None),
    (DoubleSparsity(), None, None), (Adamas(), None, 524288), (Adamas(0.11), None, None),
    (HashAttention(layer=0), None, 524288), (HashAttention(0.11, layer=0), None, None)], ids=str)
def test_which_settings_a_row_is_for(method, density, want):
    assert crossover_keys(method, density=density, gpu=H200) == want
    assert crossover_keys(method, density=density, gpu="NVIDIA H100") is None


def test_this_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert crossover_keys(Santa()) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H200)
    assert crossover_keys(Santa()) == 4096


@pytest.mark.parametrize("density", [0, -0.1, 1.5, float("nan")])
def test_bad_density(density):
    with pytest.raises(ValueError, match=r"density must lie in \(0, 1\], got"): crossover_keys(Santa(), density=density)
