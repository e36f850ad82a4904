"""Solutions of lab 6, comparing methods honestly."""
import numpy as np
import scipy.stats


def share_read(keys, values, index, n):
    "Share of a cache of n keys and values, D = 128 in bfloat16, that a head reads, with `index` bytes beside it."
    return ((keys + values) * 128 * 2 + index) / (2 * n * 128 * 2)


def paired(gains):
    "Interval (95 %) of a difference of right answers, from -1, 0 or 1 for each prompt: its two ends."
    more = np.append(gains, [1.0, -1.0])
    t = scipy.stats.t.ppf(0.975, len(gains) + 1)
    half = t * more.std() / len(more) ** 0.5
    return max(more.mean() - half, -1), min(more.mean() + half, 1)


def verdict(low, high, margin):
    "What an interval of the difference says: 'alike', 'better', 'worse' or 'unknown'."
    if -margin < low and high < margin: return "alike"
    if low > 0: return "better"
    return "worse" if high < 0 else "unknown"


def equal_window(budget, page):
    "The window, as a share of the keys, that reads as many bytes as Quest."
    return budget + 1 / page


def prompts_needed(margin):
    "How many prompts without a difference it takes until two methods are alike within a margin."
    n = 1
    while paired(np.zeros(n))[1] >= margin: n += 1
    return n


supported = {2, 5, 7, 8}
