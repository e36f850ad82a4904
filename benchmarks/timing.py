"""What every bench checks before it times: a problem that knows its exact answer, the fewest bytes of a step, and the
output of a kernel"""
import math
from collections.abc import Callable, Iterable
from functools import cached_property

import torch

from sparse_nb.bench import Shape


def dense_bytes(
    B: int, H: int, G: int, D: int, n: int, # sequences, query heads, key/value heads, head size, keys
    itemsize: int = 2,                      # bytes of a number in the cache
) -> int:
    "Fewest bytes that a dense decode step must move: keys and values once."
    return 2 * B * G * n * D * itemsize


_TILE, _STASH, _NEIGHBOURS = 128, 2, 8  # keys of a tile, bytes of a stashed exponential, keys of a stashed sum

def santa_bytes(
    B: int, H: int, G: int, D: int, n: int, # sequences, query heads, key/value heads, head size, keys
    itemsize: int = 2,                      # bytes of a number in the cache
    *,
    samples: int,                           # value rows drawn for each query head
    keys: str = "exact",                    # what is scored: "exact", "int8" or "rescored", as in `santa_decode`
) -> int:
    """Fewest bytes of a SANTA step with a global draw (SANTA section 3.2).

    Keys, sampled value rows, and a stash, of which the sampled tiles are read: of each key's exponential,
    or of sums over neighbours, which are then scored again.
    """
    rows, sums, row = H // G * samples, -(-n // _NEIGHBOURS), D * itemsize
    key, drawn = row if keys == "exact" else D + 4, min(n, rows) * row * (2 if keys == "rescored" else 1)
    stashed = lambda count, tile: _STASH * B * H * (count + min(count, samples * tile))
    again = stashed(sums, _TILE // _NEIGHBOURS) + B * G * min(n, rows * _NEIGHBOURS) * key
    return B * G * (n * key + drawn) + min(stashed(n, _TILE), again)

def flash_bytes(
    B: int, H: int, G: int, D: int, n: int, # sequences, query heads, key/value heads, head size, keys
    itemsize: int = 2,                      # bytes of a number in the cache
    *,
    samples: int,                           # value rows wanted for each query head, at least one for each tile
) -> int:
    """Fewest bytes of a SANTA-flash step (SANTA section 3.3).

    Keys, value rows of every tile, partial outputs written and read.
    """
    tiles = -(-n // _TILE)
    rows = tiles * max(1, math.floor(samples / tiles + 0.5))
    return B * G * (n + min(n, H // G * rows)) * D * itemsize + 2 * 4 * B * H * tiles * (D + 2)


def exact_moments(
    q: torch.Tensor, # queries [B, H, 1, D]
    k: torch.Tensor, # keys [B, G, N, D]
    v: torch.Tensor, # values [B, G, N, D]
):                   # float64: output [B, H, 1, D], trace of the covariance of one sampled value [B, H]
    "Exact attention and the variance of one value drawn from it, one key/value head at a time (SANTA, App. M)."
    B, H, _, D = q.shape
    G = k.shape[1]
    out, trace = (torch.empty(*shape, dtype=torch.float64, device=q.device) for shape in ((B, H, 1, D), (B, H)))
    for b in range(B):
        for g in range(G):
            heads, values = slice(g * H // G, (g + 1) * H // G), v[b, g].double()
            weights = (q[b, heads, 0].double() @ k[b, g].double().T * D**-0.5).softmax(-1)  # [R, N]
            out[b, heads, 0] = weights @ values
            trace[b, heads] = weights @ values.square().sum(-1) - out[b, heads, 0].square().sum(-1)
    return out, trace


COMPARED = 8e9  # bytes of the largest cache that a reference, which makes float32 copies, has to read

class Case:
    "One problem to decode: Gaussian inputs, their exact output and the variance of a sampled value, made on demand."
    def __init__(
        self,
        shape: Shape,                          # heads
        n: int,                                # keys
        B: int = 1,                            # sequences
        *,
        dtype: torch.dtype = torch.bfloat16,   # of the cache
        device: str = "cuda",                  # of all tensors
        seed: int = 0,                         # of the inputs, and of what is sampled
    ):
        self.shape, self.n, self.B, self.dtype, self.device, self.seed = Shape(*shape), n, B, dtype, device, seed

    def _normal(self, stream, *size):
        seed = hash((self.seed, *self.shape, self.n, self.B, stream)) % 2**63
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*size, dtype=self.dtype, device=self.device, generator=generator)

    @cached_property
    def q(self):
        "Queries [B, H, 1, D]."
        return self._normal(0, self.B, self.shape.H, 1, self.shape.D)

    @cached_property
    def k(self):
        "Keys [B, G, N, D]."
        return self._normal(1, self.B, self.shape.G, self.n, self.shape.D)

    @cached_property
    def v(self):
        "Values [B, G, N, D]."
        return self._normal(2, self.B, self.shape.G, self.n, self.shape.D)

    @cached_property
    def by_position(self):
        "Keys and values [B, N, G, D]."
        return self.k.transpose(1, 2).contiguous(), self.v.transpose(1, 2).contiguous()

    @cached_property
    def truth(self):
        "What `exact_moments` returns."
        return exact_moments(self.q, self.k, self.v)

    @property
    def sizes(self) -> dict:
        "B, H, G, D and n, as the byte counts take them."
        return dict(B=self.B, **self.shape._asdict(), n=self.n)


def cache_bytes(
    case: Case,
) -> int:
    "Bytes of its keys and values."
    return dense_bytes(**case.sizes, itemsize=case.dtype.itemsize)

def bytes_needed(
    case: Case,
) -> int:
    """Device memory that measuring it takes, about.

    Keys and values in two layouts, float32 copies for the reference, float64 ones of one head, scores, workspaces.
    """
    cache, copies = cache_bytes(case), 6 * 8 * case.n * case.shape.D
    scores = 10 * 8 * case.B * case.shape.H * case.n
    return 2 * cache + (2 * cache if cache <= COMPARED else 0) + copies + scores + 3 * 10**9


DENSE_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3}  # relative, allowed to a dense kernel

class Refused(Exception):
    "A kernel that gives a wrong answer or cannot do a case; the message says why."

def relative(
    out: torch.Tensor,
    want: torch.Tensor, # float64, of the same shape
) -> float:
    "Length of the difference over that of what is wanted."
    return float((out.double() - want).norm() / want.norm())

def largest(errors: Iterable) -> float:
    "The largest of some numbers; NaN where one is NaN, which `max` may pass over."
    return float(torch.tensor([*errors], dtype=torch.float64).max())

def refuse_above(
    error: float,
    allowed: float = 0.01,
    what: str = "differs from the reference by {:.3g} of it",
) -> float: # the error
    "Raise `Refused` for an error that is not below what is allowed."
    if not error < allowed: raise Refused(what.format(error))
    return error

def close_to(
    want: torch.Tensor, # float64
    allowed: float = 0.01,
) -> Callable: # gets an output, returns its relative error or raises `Refused`
    "A check against this output."
    return lambda out: refuse_above(relative(out, want), allowed)

def worst_of_lists(
    out: torch.Tensor, # what a step returned [1, H, 1, D]
    shape: Shape,
    want: Callable,    # number of a list, slice of its heads -> their exact output [heads, D], float64
    wide: int,         # heads of a list
) -> float:            # of the lists of every third group
    "Largest relative error of the heads of a list. Raises `Refused` above a percent."
    H, G, _ = shape
    lists = [i for i in range(H // wide) if i * wide * G // H % 3 == 0]
    heads = {i: slice(i * wide, (i + 1) * wide) for i in lists}
    return refuse_above(largest(relative(out[0, heads[i], 0], want(i, heads[i])) for i in lists))


def _shaped(out, exact):
    if out.shape != exact.shape: raise Refused(f"out must have the shape {list(exact.shape)}, got {list(out.shape)}")

def check_dense(
    out: torch.Tensor, # what the kernel returned [B, H, 1, D]
    case: Case,
) -> float:            # relative error
    "Hold a dense kernel against exact attention in float64. Raises `Refused`."
    exact, _ = case.truth
    _shaped(out, exact)
    error, allowed = relative(out, exact), DENSE_ERROR[case.dtype]
    if not error <= allowed: raise Refused(f"relative error {error:.3g}, allowed is {allowed:g}")
    return error


_FLIPPED, _Z = 0.25, 6.0  # share of the draws that may differ from the reference's; standard deviations allowed

def check_sampled(
    out: torch.Tensor,                     # what the kernel returned [B, H, 1, D]
    case: Case,
    samples: int,                          # value rows drawn for each head
    reference: torch.Tensor | None = None, # what the PyTorch reference returns for the same seed; None: not compared
) -> float:                                # relative error
    "Hold a sampling kernel against the variance of its samples, and the reference's draws. Raises `Refused`."
    exact, trace = case.truth
    _shaped(out, exact)
    B, (_, G, D) = case.B, case.shape
    squared, expected = float((out.double() - exact).square().sum()), float(trace.sum()) / samples
    ratio, allowed = squared / expected, 1 + _Z * (2 / (B * G * D)) ** 0.5
    if not ratio <= allowed:
        raise Refused(f"squared error is {ratio:.3g} times that of {samples} independent samples, "
                      f"allowed is {allowed:.3g}")
    if reference is not None:
        reference = reference.double()
        distance = float((out.double() - reference).norm())
        independent = 2 * float((reference - exact).square().sum())
        rounding = DENSE_ERROR[case.dtype] * float(reference.norm())
        if not distance <= (_FLIPPED * independent) ** 0.5 + rounding:
            raise Refused(f"{distance**2 / independent:.0%} of the draws differ from the reference's, "
                          f"allowed is {_FLIPPED:.0%}")
    return relative(out, exact)
