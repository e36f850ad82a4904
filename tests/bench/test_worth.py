"""What a method saves of a token: the sum, Amdahl's bound, what was not measured, and whose records count."""
import pytest

pytest.importorskip("transformers")

from sparse_nb.bench import SHAPES
from benchmarks.generate import EXACT, LLAMA, PAIR, TINY
from benchmarks.worth import kernel_times, records_of, worth

SANTA, WALK = "SANTA, 128 samples", "Sketch&Walk, 10 %"
LAYERS = LLAMA["num_hidden_layers"]


def decode_rows(n, B, santa, dense, mode="graph"):
    base = dict(n=n, B=B, H=32, G=8, D=128, mode=mode)
    return [base | dict(method="santa_systematic", median_us=santa), base | dict(method="sdpa_flash", median_us=dense),
            base | dict(method="sdpa_cudnn", median_us=2 * dense)]


def walk_rows(n, walk, dense):
    base = dict(n=n, H=32, memory="device")
    own = dict(method="sketch_walk", launch="merge", block=64, index="fine4", asked=0.1, median_us=walk)
    return [base | own, base | own | dict(launch="read", median_us=1.0), base | own | dict(asked=0.2, median_us=1.0),
            base | own | dict(memory="host", median_us=1.0), base | own | dict(heads="each", median_us=1.0),
            base | dict(method="sdpa_flash", median_us=dense)]


@pytest.fixture
def records():
    whole = lambda way, n, ms, **more: dict(way=way, n=n, median_us=1e3 * ms, q1_us=0, q3_us=0) | more
    models = [whole(PAIR[0], 1000, 20.0), whole(SANTA, 1000, 40.0), whole(PAIR[0], 3000, 21.0),
              whole(SANTA, 3000, 42.0),
              *(whole(way, 3000, ms, static=True, batch=1) for way, ms in ((PAIR[0], 9.0), (EXACT, 8.0), (SANTA, 5.0)))]
    speeds = dict(copy_gb_s=4000.0, read_gb_s=5000.0)
    return {"decode": dict(meta=speeds, rows=[*decode_rows(1000, 1, 10.0, 15.0), *decode_rows(3000, 1, 20.0, 45.0),
                                              *decode_rows(1000, 1, 1.0, 1.0, mode="eager")]),
            "sketch_walk_launches": dict(meta=speeds, rows=walk_rows(1000, 5.0, 15.0)),
            "generate": dict(meta=dict(shape=LLAMA), rows=models)}


def row_of(method, *args, **kwargs): return next(row for row in worth(*args, **kwargs) if row["method"] == method)


def test_the_sum_is_weights_and_attention(records):
    row = row_of(SANTA, records, 1000)
    params = 128256 * 4096 + 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096) + 4096
    weights = 2 * params / 5000e9 * 1e3  # the embedding is not read, the head is as large
    assert row["least_ms"] == pytest.approx(weights + LAYERS * 0.010) and row["times"] == pytest.approx(1.5)
    assert row["dense_least_ms"] == pytest.approx(weights + LAYERS * 0.015) and row["dense_us"] == 15.0
    assert row["least_times"] == pytest.approx(1 / (1 - row["share"] + row["share"] / row["times"]))


def test_layers_that_stay_exact_count_as_dense_ones(records):
    row, other = row_of(WALK, records, 1000), row_of(SANTA, records, 1000)
    weights = other["least_ms"] - LAYERS * 0.010
    assert row["kernel_us"] == 5.0 and row["least_ms"] == pytest.approx(weights + 30 * 0.005 + 2 * 0.015)


def test_between_two_lengths_is_a_line_and_outside_nothing(records):
    assert row_of(SANTA, records, 2000)["kernel_us"] == pytest.approx(15.0)
    for n, batch in ((999, 1), (3001, 1), (1000, 8)):
        row = row_of(SANTA, records, n, batch)
        assert row["kernel_us"] is None and "least_ms" not in row
    assert row_of(WALK, records, 3000)["kernel_us"] is None


def test_a_static_cache_goes_before_a_growing_one_and_the_rival_is_the_fastest(records):
    row = row_of(SANTA, records, 3000)
    assert (row["cache"], row["model_ms"], row["model_times"]) == ("static", 5.0, pytest.approx(8.0 / 5.0))
    row = row_of(SANTA, records, 1000)
    assert (row["cache"], row["model_times"]) == ("growing", pytest.approx(0.5))
    assert row_of(SANTA, records, 2000)["model_ms"] is None             # no model is guessed between lengths
    deep = row_of(SANTA, records, 3000, shape=LLAMA | dict(num_hidden_layers=33))
    assert deep["model_ms"] is None and deep["least_ms"] > row_of(SANTA, records, 3000)["least_ms"]


@pytest.mark.parametrize("args, why", [
    ((0,), "n must be at least 1, got 0"), ((8, 0), "batch must be at least 1, got 0"),
    ((8, 1, TINY), "shape must have heads that were recorded")])
def test_bad_questions(records, args, why):
    with pytest.raises(ValueError, match=why): worth(records, *args)


def test_what_is_committed_can_be_asked():
    with pytest.raises(ValueError, match="gpu must be one of .*NVIDIA H200.*, got 'abacus'"): worth("abacus", 8192)
    committed = records_of("NVIDIA H200")
    for method in (SANTA, WALK, "vAttention, 10 %"):
        row = row_of(method, committed, 131072)
        assert 1 < row["least_times"] < 1 / (1 - row["share"]) and row["times"] > 1, method
    assert {row["method"] for row in kernel_times(committed, SHAPES["pocket"])} == {SANTA}
