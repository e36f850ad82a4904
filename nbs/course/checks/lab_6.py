"""Checks of lab 6, comparing methods honestly."""
import numpy as np
import scipy.stats

from sparse_nb import Exact, Quest, Streaming
from sparse_nb.evaluate import accuracy, compare
from sparse_nb.metrics import paired_interval

from . import check, close, need, parts, result, same


@check
def share_read(answer):
    for case in ((1000, 1000, 0, 10_000), (1000, 1000, 10_000 * 16, 10_000), (131_072, 512, 0, 131_072)):
        keys, values, index, n = case
        whole = 2 * n * 128 * 2
        want = ((keys + values) * 256 + index) / whole
        same(result(answer, *case), want, f"the share for keys, values, index bytes, n = {case}", {
            "the index is read, too": (keys + values) * 256 / whole,
            "the cache has keys and values: 2 n numbers of size D": 2 * want,
            "keys and values are counted apart: a method may read all keys and few values": (2 * keys * 256 + index
                                                                                           ) / whole,
            "a number has two bytes": ((keys + values) * 128 + index) / whole}, 1e-9)
    return f"SANTA with 512 values of 131,072 keys reads {answer(131_072, 512, 0, 131_072):.1%} of the cache"


def other_intervals(gains):
    "What typical mistakes give."
    n, more = len(gains), np.append(gains, [1.0, -1.0])
    t, cut = scipy.stats.t.isf(0.025, n + 1), lambda x, half: np.clip(x.mean() + half * np.array([-1, 1]), -1, 1)
    ends = lambda x, factor, ddof=0: cut(x, factor * x.std(ddof=ddof) / len(x) ** 0.5)
    return {"add one prompt of each kind first, a gained and a lost one": ends(gains, t),
            "add one prompt of each kind first, before anything else": ends(gains, scipy.stats.t.isf(0.025, n - 1)),
            "the quantile leaves half of 5 % on each side: 0.975, not 0.95": ends(more, scipy.stats.t.isf(0.05, n + 1)),
            "the length of the interval falls with the root of the number of prompts": cut(more, t * more.std()),
            "add one prompt of each kind first; and take Student's quantile": ends(gains, 1.96),
            "take the quantile of Student's distribution with n + 1 degrees of freedom, not the Gaussian one":
                ends(more, scipy.stats.norm.isf(0.025)),
            "the standard deviation has the divisor n + 2 here": ends(more, t, 1)}


@check
def paired(answer, lost):
    for gains in ([1, 1, -1, 0, 0, 0, 0, 1], [0] * 20, [1] * 6 + [0] * 30):
        gains = np.array(gains, dtype=float)
        right = paired_interval(gains)
        got = np.array([float(x) for x in parts(result(answer, gains), 2, "the lower and the upper end")])
        need(got[0] <= got[1], "the lower end comes first")
        want = np.clip(scipy.stats.t.isf(0.025, len(gains) + 1) * np.append(gains, [1, -1]).std() / (
            len(gains) + 2) ** 0.5 * np.array([-1, 1]) + np.append(gains, [1, -1]).mean(), -1, 1)
        assert np.allclose(want, [right.low, right.high])
        same(got, want, f"the interval of {len(gains)} prompts with {int((gains > 0).sum())} gained and "
             f"{int((gains < 0).sum())} lost", other_intervals(gains), 1e-4)
    said = []
    for name, x in lost.items():
        few, all_of_them = (100 * np.array(answer(np.asarray(x[:n], dtype=float))) for n in (20, len(x)))
        said.append(f"{name}: {few[0]:.1f} to {few[1]:.1f} from 20 prompts, {all_of_them[0]:.1f} to "
                    f"{all_of_them[1]:.1f} from {len(x):,}")
    return "points lost on the pocket model, " + "; ".join(said)


@check
def verdict(answer):
    cases = {(-0.02, 0.01): "alike", (-0.02, 0.10): "unknown", (0.01, 0.10): "better", (-0.10, -0.01): "worse",
             (-0.30, 0.30): "unknown", (0.005, 0.02): "alike", (-0.02, -0.005): "alike", (0.04, 0.10): "better",
             (-0.10, 0.02): "unknown"}
    got = {case: result(answer, *case, 0.03) for case in cases}
    need(set(got.values()) <= {"alike", "better", "worse", "unknown"},
         f"say 'alike', 'better', 'worse' or 'unknown', got {sorted(map(str, set(got.values())))}")
    need(got[-0.30, 0.30] != "alike", "an interval from -30 to 30 points holds 0, but a large loss is possible: "
         "'alike' needs the whole interval inside the margin")
    need(got[0.005, 0.02] == got[-0.02, -0.005] == "alike",
         "0.5 to 2 points are a difference, but one that was said beforehand not to matter: 'alike'")
    for case, want in cases.items():
        need(got[case] == want, f"for the interval {case} and a margin of 0.03 expected is {want!r}, got {got[case]!r}")
    return "nine intervals"


@check
def equal_window(answer, model, tokenizer):
    for budget, page in ((0.1, 16), (0.1, 64), (0.05, 8)):
        same(result(answer, budget, page), budget + 1 / page, f"the window for Quest with {budget:.0%} of the keys and "
             f"pages of {page}", {"Quest's index is read, too": budget,
                                  "an index of two vectors a page is 1 / page of keys and values together": budget +
                                  2 / page, "a page has two vectors: the smallest and the largest entries": budget +
                                  0.5 / page}, 1e-9)
    window = Streaming(sinks=4, window=float(answer(0.1, 16)))
    frame = accuracy(model, tokenizer, "kv", 512, {"exact": Exact(), "Quest": Quest(budget=0.1, page=16),
                                                   "window": window}, prompts=8, batch=8)
    right = frame.groupby("method", sort=False).exact.sum().to_dict()
    found = compare(frame, "Quest", "window")
    return (f"right answers of 8: {', '.join(f'{name} {n}' for name, n in right.items())}; Quest answers "
            f"{100 * found.low:.0f} to {100 * found.high:.0f} points more than a window of equal bytes")


@check
def prompts_needed(answer):
    for margin in (0.03, 0.05, 0.1):
        inside = lambda n: paired_interval(np.zeros(n)).high < margin
        want = next(n for n in range(1, 1000) if inside(n))
        got = result(answer, margin)
        need(not close(got, want - 1), f"with {want - 1} prompts the interval still reaches {margin}")
        same(got, want, f"the number of prompts for a margin of {margin}", {
            "two methods that agree on every prompt still have an interval: add the two prompts": 1.0}, 1e-9)
    return f"{answer(0.03)} prompts without a difference for three points, {answer(0.1)} for ten"


QUESTIONS = {1: "how long is the interval of 20 prompts?", 2: "compare the two columns",
             3: "do both read equally many bytes, and what does one prompt of 20 say?",
             4: "what was timed, and was it timed in the same way?", 5: "count", 6: "on which prompts was A tuned?",
             7: "what could be lost?", 8: "what does B read beside its keys?"}


@check
def supported(answer):
    need(isinstance(answer, (set, frozenset)), f"give a set of numbers, got {type(answer).__name__}")
    need(answer <= set(QUESTIONS), f"there are statements 1 to 8, got {sorted(answer - set(QUESTIONS))}")
    wrong = sorted(answer ^ {2, 5, 7, 8})
    need(not wrong, f"{len(wrong)} of 8 wrong. Look at statement {wrong[0] if wrong else 0} again: "
         f"{QUESTIONS[wrong[0]] if wrong else ''}")
    return "four statements follow from the table, four do not"


