"""Where the time of a step goes, beside the dense kernels of the same run, and with the cache in host memory"""
import math
from functools import partial

import torch

from sparse_nb.bench import Shape
from benchmarks.timing import Case, Refused
from sparse_nb.kernels.vattention import GUESS, Found, Settings, launch
from benchmarks.recorder import Recorder, measure_copy, measure_dense, measure_launches, to_host
from sparse_nb.vattention import read_rows


DENSITY, HOST = 0.1, (0.05, 0.1, 0.2, 0.4)  # shares with keys in host memory
LAUNCHES = dict(code="code_kernel") | {
    name: f"_{name}_kernel" for name in ("guess", "count", "keep", "look", "sample", "merge")}
EPS, SEED = 0.1, 7

def signatures(case: Case, generator: torch.Generator) -> dict:
    "Random signatures of the keys, and random networks of the queries."
    (H, G, D), M, device = case.shape, 64, case.device
    normal = lambda *shape: (torch.randn(*shape, device=device, generator=generator) / 10).half()
    codes = torch.randint(-2**31, 2**31, (1, G, case.n, 1), device=device, generator=generator).int()
    return dict(codes=codes, maps=(normal(H, D, M), normal(H, M), normal(H, M, 32), normal(H, 32)), seed=SEED)

def settings_for(case: Case, density: float, ends: int, given: dict, tries: int = 3) -> tuple:
    "Settings that read this share of the keys, as far as what they must draw leaves room."
    topk, base, n = density / 2, density / 4, case.n
    for _ in range(tries):
        s = Settings(ends, ends, topk, base, 32, eps=EPS, log=math.log(2 / 0.08), square=1.7506860712521692**2,
                     plug=math.log(1 / 0.01))
        found = launch(case.q, case.k, case.v, s, case.shape.G, **given)
        kept = 2 * ends + math.ceil(n * topk * (1 - 1e-12))
        drawn, extra = (x.sum(-1).float().mean().item() for x in (found.base, found.extra))
        share, topk = (kept + drawn + extra) / n, max(0.001, density - (2 * ends + drawn + extra) / n)
    row = dict(method="vattention", n=n, density=round(share, 4), kept=kept, base=round(drawn), extra=round(extra))
    return s, found, row


def worst_error(
    result: torch.Tensor, # what a step returned [1, H, 1, D]
    case: Case,
    found: Found,         # of the same step
    kept: int,            # keys that each list keeps
) -> float:               # of the groups that are looked at, every third
    "Largest relative error of a group against attention over the rows read. Raises `Refused` above a percent."
    (H, G, D), worst = case.shape, 0.0
    for g in range(0, G, 3):
        own = Found(*(x[:, g:g + 1] if isinstance(x, torch.Tensor) else x for x in found))
        read = read_rows(own, torch.full((1, 1), kept, device=result.device), 1)
        i, heads = read.weight[0, 0, 0].nonzero().squeeze(-1), slice(g * H // G, (g + 1) * H // G)
        row, weight = read.index[0, 0, 0, i], read.weight[0, 0, 0, i].double()
        if len(row.unique()) < len(row): raise Refused("a row was read twice")
        score = case.q[0, heads, 0].double() @ case.k[0, g, row].double().T * D**-0.5 + weight.log()
        want = score.softmax(-1) @ case.v[0, g, row].double()
        worst = max(worst, float((result[0, heads, 0].double() - want).norm() / want.norm()))
    if not worst < 0.01: raise Refused(f"differs from the reference by {worst:.3g} of it")
    return worst


def _read_bytes(case, given, row):
    "What each launch has to read."
    (_, G, D), n = case.shape, case.n
    rows = lambda count: 4 * G * D * count  # of keys and values, two bytes a number
    return dict(code=sum(x.nbytes for x in given["maps"]), guess=4 * GUESS * G, count=4 * n * G, keep=n * G,
                look=rows(row["kept"] + row["base"]), sample=rows(row["extra"]), merge=0)

def measure_step(recorder: Recorder, case: Case, names: tuple, given: dict, s: Settings, found: Found, row: dict):
    "Time the steps up to each of these launches; given: of `signatures`, what follows: of `settings_for`."
    measure_launches(recorder, LAUNCHES, names,
                     lambda: launch(case.q, case.k, case.v, s, case.shape.G, **given).out,
                     lambda out: worst_error(out, case, found, row["kept"]), _read_bytes(case, given, row), **row)

def _measure_host(recorder, case, given, chosen):
    "Time whole steps with keys and values in host memory, and a copy of these; `chosen`: of `settings_for`."
    far = to_host(case.k, case.v)
    for s, found, row in chosen:
        step = partial(launch, case.q, *far, s, case.shape.G, **given)
        nbytes = 4 * case.shape.G * case.shape.D * (row["kept"] + row["base"] + row["extra"])
        recorder.measure_row(lambda: step().out, lambda out: worst_error(out, case, found, row["kept"]), **row,
                             launch="merge", memory="host", nbytes=nbytes)
    measure_copy(recorder, [case.k, case.v], far, memory="host")


@torch.no_grad()
def vattention_launches(recorder):
    "A step launch by launch; on a CPU one part of the launches, with small heads."
    ends, names, density, host, tries = (128, LAUNCHES, DENSITY, HOST, 3) if recorder.gpu else (
        8, ("keep",), 0.6, (0.6,), 1)
    for i, case in enumerate(recorder.cases((131072, 524288, 1048576), 16384, 128, Shape(1, 1, 16))):
        measure_dense(recorder, case, memory="device")
        given = signatures(case, torch.Generator(recorder.device).manual_seed(0))
        densities = {density} if i else {density, *host}
        chosen = {x: settings_for(case, x, ends, given, tries) for x in sorted(densities)}
        measure_step(recorder, case, names, given, *chosen[density])
        if not i: _measure_host(recorder, case, given, [chosen[x] for x in host])
    return dict(density=DENSITY, inputs="Gaussian, random signatures", eps=EPS, delta=0.1)
