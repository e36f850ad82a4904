"""Which of many cases of a test to run so that each value meets each other one: a covering design of strength two."""
import random
from itertools import combinations, product

from inputs import GPU, INTERPRETED


def pairs(case):
    "Every value and every pair of values of `case`, a dict from a parameter's name to its value."
    values = sorted((name, repr(value)) for name, value in case.items())
    return {*combinations(values, 1), *combinations(values, 2)}


def cases_of(function):
    "The cases of a test function, by its marks `parametrize`."
    axes = []
    for mark in getattr(function, "pytestmark", ()):
        if mark.name != "parametrize": continue
        names, values = mark.args
        names = [name.strip() for name in names.split(",")]
        rows = [getattr(value, "values", value if len(names) > 1 else [value]) for value in values]
        axes.append([dict(zip(names, row)) for row in rows])
    return [{name: x for part in parts for name, x in part.items()} for parts in product(*axes)]


def covering(cases):
    """The numbers of some of `cases` that hold every pair of values that all of them hold; without any of them, one
    would be missing."""
    if not any(cases): return [*range(len(cases))]
    left, chosen = set().union(*map(pairs, cases)), []
    while left:
        chosen.append(max(range(len(cases)), key=lambda i: len(pairs(cases[i]) & left)))
        left -= pairs(cases[chosen[-1]])
    for i in list(chosen):
        others = [pairs(cases[j]) for j in chosen if j != i]
        if pairs(cases[i]) <= set().union(*others): chosen.remove(i)
    return sorted(chosen)


def drawn(factors, seed=0):
    """Cases in which each pair of values of two factors appears, of 400 that are drawn; none where no kernel can run.

    `factors`: the name of a parameter -> its values."""
    if not (GPU or INTERPRETED): return []
    draw = random.Random(seed)
    cases = [{name: draw.choice(values) for name, values in factors.items()} for _ in range(400)]
    return [cases[i] for i in covering(cases)]
