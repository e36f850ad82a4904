"""The commands that measure: `python -m benchmarks.run`, `experiments.run` and `benchmarks.parts`."""
import json

import pytest
import torch

from benchmarks import parts, run
from benchmarks.recorder import write_record
from benchmarks.registry import REGISTRY

TIMED = [dict(method="exact", n=n, nbytes=8 * n, median_us=x, q1_us=x, q3_us=x, error=x / 1e4)
         for n, x in ((1024, 10.0), (2048, 20.0))]


def one_line(capsys, main, args, *words):
    "The command says one line with these words, and ends with 2."
    with pytest.raises(SystemExit) as stop: main([*map(str, args)])
    said = capsys.readouterr()
    assert stop.value.code == 2 and not said.out and len(said.err.splitlines()) == 1, said
    for word in words: assert word in said.err, said.err


def listed(capsys, package):
    run.main(["--list"], package)
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()]


def test_each_measurement_is_listed_by_one_command(capsys):
    speed, answers = listed(capsys, "benchmarks"), listed(capsys, "experiments")
    assert {*speed} | {*answers} == {*REGISTRY} and not {*speed} & {*answers}
    assert "decode" in speed and "saap" in answers


@pytest.mark.parametrize("args, words", [
    ([], ["give a NAME or --list"]), (["gather", "--list"], ["and not both"]), (["speed"], ["NAME must be one of"]),
    (["saap"], ["NAME must be one of decode"]),
    (["gather", "--out", "x.csv"], ["--out must end in .json, got 'x.csv'"]),
    (["gather", "--compare", "x.csv"], ["--compare must end in .json"]),
    (["gather", "--compare", "no.json"], ["No such file", "no.json"])])
def test_bad_arguments_take_one_line(capsys, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    one_line(capsys, run.main, args, *words)
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_nothing_is_measured(capsys, tmp_path):
    one_line(capsys, run.main, ["decode", "--out", tmp_path / "new.json"], "CUDA")
    for kind in "decode", "prefill":
        one_line(capsys, parts.main, [kind, "--out", tmp_path / "new"], "there is no CUDA device here")
    assert not [*tmp_path.iterdir()]


def test_a_run_is_compared_row_by_row(capsys, tmp_path, monkeypatch):
    stored = write_record(tmp_path / "stored.json", {}, TIMED)
    faster = [row | dict(median_us=row["median_us"] * x) for row, x in zip(TIMED, (0.5, 2))] + [
        TIMED[0] | dict(n=4096)]
    monkeypatch.setattr(run, "run_record", lambda name, out, **_: write_record(tmp_path / "new.json", {}, faster))
    run.main(["exact", "--quick", "--compare", str(stored)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [float(x[0]) for x in lines] == [0.5, 2] and "n=1024," in lines[0]
    with pytest.raises(ValueError, match="found none"): run.compare(TIMED, [row | dict(n=1) for row in TIMED])


# parts of a result file

@pytest.mark.parametrize("options, words", [
    (["--lengths", "4k"], ["--lengths must be whole numbers", "got '4k'"]), (["--lengths", ""], ["got ''"]),
    (["--batches", "1,-2"], ["--batches must be whole numbers", "got '1,-2'"]),
    (["--batches", "0"], ["batches must be at least 1, got 0"]),
    (["--shapes", "llama9"], ["shapes must be", "llama3, pocket, got 'llama9'"]),
    (["--methods", "flashinfer,magic"], ["methods must be", "flashinfer", "got 'magic'"]),
    (["--methods", ","], ["got ','"]),
    (["--samples", "0"], ["samples must be at least 1"]), (["--dtype", "float64"],
                                                           ["--dtype must be", "got 'float64'"]),
    (["--colour"], ["--colour"])])
def test_bad_options_of_a_step(capsys, options, words):
    one_line(capsys, parts.main, ["decode", *options], *words)


@pytest.mark.parametrize("options, words", [
    (["--lengths", "8k"], ["--lengths must be whole numbers", "got '8k'"]), (["--lengths", ","], ["got ','"]),
    (["--lengths", "8192,0"], ["lengths must be at least 1", "got 0"]),
    (["--lengths", "9999999"], ["at most 1048576"])])
def test_bad_options_of_prompts(capsys, options, words):
    one_line(capsys, parts.main, ["prefill", *options], *words)


@pytest.mark.parametrize("options, words", [
    *(([f"--{x}", 0], [f"--{x} must be at least 1, got 0"]) for x in ("batch", "tokens", "layers")),
    (["--lengths", "many"], ["--lengths must be whole"]),
    (["--static", "--offload"], ["--offload must not stand with --static"]),
    (["--tuned"], ["--tuned must stand with --static"]),
    (["--decode", "Santa(samples=0)"], ["--decode: samples must be"]),
    (["--decode", "no"], ["--decode: method must be one of"])])
def test_bad_options_of_a_whole_model(capsys, options, words):
    one_line(capsys, parts.main, ["generate", *options], *words)


@pytest.mark.parametrize("args, words", [
    *(([kind, "--out", "x.csv"], ["--out must end in .json, or be a folder, got 'x.csv'"])
      for kind in ("decode", "prefill", "generate")),
    *((["decode", "--budget", x], [f"--budget must be above 0, got {float(x)}"]) for x in ("0", "-1", "nan")),
    *(([kind, "--seconds", x], [f"--seconds must be above 0, got {float(x)}"])
      for kind in ("decode", "generate") for x in ("0", "nan")),
    *((["decode", f"--{name}", "many"], [f"--{name}"]) for name in ("samples", "budget", "seconds")),
    *((["generate", f"--{name}", "many"], [f"--{name}"]) for name in ("batch", "tokens", "layers", "seconds"))])
def test_other_bad_options_take_one_line(capsys, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    one_line(capsys, parts.main, args, *words)
    assert not [*tmp_path.iterdir()]


def test_any_methods_tokens_are_timed(tmp_path):
    asked = ["Santa(samples=8)", "VAttention(predictor=HashAttention(maps='random'))"]
    options = [x for words in asked for x in ("--decode", words)]
    parts.main(["generate", "--quick", "--static", "--filled", "--no-kernels", "--batch", "2", "--tokens", "2",
                "--lengths", "100", "--layers", "2", *options, "--out", str(tmp_path / "x.json")])
    record = json.loads((tmp_path / "x.json").read_text())
    rows = {row["way"]: row for row in record["rows"] if row["n"] == 100}
    assert list(rows) == ["the model alone", "exact kernel", *asked] and record["meta"]["failed"] == []
    assert all((row["filled"], row["batch"], row["static"], row["kernel_us"]) == ("drawn", 2, True, None)
               for row in rows.values()) and record["meta"]["shape"]["num_hidden_layers"] == 2
    assert json.loads(rows[asked[0]]["method"])["samples"] == 8
