"""Where the time of a step goes that guesses, chooses a tenth of the keys and reads them, beside the dense kernels of
the same run"""
from functools import partial
from typing import NamedTuple

import torch

from sparse_nb.baselines import CUT, Adamas, DoubleSparsity, HashAttention, Quest
from sparse_nb.bench import Shape
from benchmarks.timing import Case, Refused
from sparse_nb.core.methods import Predictor, State
from sparse_nb.hash_attention import BITS, PARTS
from sparse_nb.kernels.choose import Place, launch_list, score
from sparse_nb.kernels.gather import attend
from benchmarks.attention import check_lists
from benchmarks.recorder import Recorder, measure_dense, up_to


DENSITY, HIDDEN = 0.1, 128  # share of the keys, hidden numbers of a network
LAUNCHES = "score", "sift", "select", "list", "attend"         # the marks are within `score`
BEFORE = dict(sift="_select_kernel", select="_list_kernel")    # launch -> kernel of the next
COUNTED = "score", "list", "attend"                           # where scores are counted as they are made
METHODS = Quest(DENSITY), DoubleSparsity(DENSITY), Adamas(DENSITY), HashAttention(DENSITY, layer=0)

class Asked(NamedTuple):
    "A method, its index of the keys of a case, and what the kernels are told of it."
    case: Case
    method: Predictor
    state: State
    kind: str
    number: float
    given: tuple
    place: Place

def drawn_networks(case: Case, hidden: int = HIDDEN) -> dict:
    "Gaussian networks for the keys and for the queries."
    (H, G, D), generator = case.shape, torch.Generator(case.device).manual_seed(1)
    draw = lambda *size: torch.randn(*size, device=case.device, generator=generator) * size[-2]**-0.5
    sizes = lambda heads: ((heads, D, hidden), (heads, hidden), (heads, hidden, BITS), (heads, BITS))
    return {part: draw(*size) for part, size in zip(PARTS, sizes(G) + sizes(H))}

def asked(case: Case, method: Predictor) -> Asked:
    "The index of its keys."
    state, place, number = method.new_state(), Place(case.n), case.shape.D**-0.5
    if isinstance(method, HashAttention): state.held = drawn_networks(case)
    state.append(case.k, case.v)
    known = lambda kind, number, *given, place=place: Asked(case, method, state, kind, number, given, place)
    if isinstance(method, Quest):
        return known("boxes", number, place=Place(case.n, begin=state.begin, unit=method.page))
    if isinstance(method, DoubleSparsity): return known("channels", number, state.fit)
    if isinstance(method, Adamas): return known("codes", CUT)
    return known("signs", number, *(state.held[part] for part in PARTS if part[0] == "q"))

def launches_of(x: Asked) -> tuple: return COUNTED if x.kind == "signs" else LAUNCHES


def step(
    x: Asked,
    last: str = LAUNCHES[-1], # launch that is the last one
) -> tuple: # output [1, H, 1, D], list, weights: None where no launch makes them, not filled where not all of one did
    "The first launches of a step."
    scores, known = score(x.kind, x.case.q, x.state.rows, x.given, x.number, DENSITY, x.place)
    if last == "score": return None, None, None
    listed = partial(launch_list, scores, DENSITY, x.place, after=True, known=known)
    if last in BEFORE: listed = up_to(listed, BEFORE[last])
    index, weight, count = listed()
    out = attend(x.case.q, x.case.k, x.case.v, index, weight, count) if last == "attend" else None
    return out, index, weight

def list_error(
    x: Asked,
    index: torch.Tensor,  # the list [1, H, 1, S]
    weight: torch.Tensor, # likewise
) -> float:
    "How much worse than the best the listed keys are, in standard deviations of a head. Raises `Refused`."
    guess = x.method.priorities(x.case.q, x.state)[:, :, 0].double()
    if not (weight == 1).all() or (index.diff(dim=-1) <= 0).any(): raise Refused("a list has a hole or no order")
    got, best = guess.gather(-1, index[:, :, 0]).sort(-1).values, guess.topk(index.shape[-1]).values.flip(-1)
    error = float(((got - best).abs().amax(-1) / guess.std(-1)).max())
    if not error < 1e-4: raise Refused(f"a listed key is {error:.3g} deviations below the best")
    return error


def measure_method(recorder: Recorder, x: Asked):
    "Rows of the step up to each launch, and of the attention to its list and to that of each group's first head."
    case, (H, G, D), held = x.case, x.case.shape, {}
    _, index, weight = step(x)
    none = torch.zeros_like(weight)
    measure = partial(recorder.measure_row, method=type(x.method).__name__, n=case.n, index_bytes=x.state.rows.nbytes)
    checks = {"list": lambda out: list_error(x, held["index"], out), "attend": check_lists(case, index, weight)}
    def call(last):
        out, held["index"], weights = step(x, last)
        return {"score": none, "attend": out}.get(last, weights)
    for name in launches_of(x): measure(partial(call, name), checks.get(name), launch=name)
    for lists in (H, G):
        rows = index[:, ::H // lists].contiguous()
        measure(lambda: attend(case.q, case.k, case.v, rows, weight), check_lists(case, rows, weight),
                launch="attend alone", lists="a head" if lists == H else "a group",
                nbytes=2 * lists * rows.shape[-1] * D * case.k.element_size())

@torch.no_grad()
def choose(recorder):
    "Steps that choose keys."
    for case in recorder.cases((32768, 131072, 524288), 16384, 200, Shape(2, 1, 32)):
        measure_dense(recorder, case, kernels=("sdpa_cudnn", "sdpa_flash"))
        for method in METHODS: measure_method(recorder, asked(case, method))
    return dict(density=DENSITY, hidden=HIDDEN)
