"""Checks of lab 5, a kernel in Triton's interpreter, and its time. On a GPU the kernels run there."""
import math

import torch

from sparse_nb.attention import attention

from . import check, close, need, result, same

EMPTY = -777.0  # what is in the memory of an output beforehand

device, SIZE, TILE = "cuda" if torch.cuda.is_available() else "cpu", 32, 64


def one_head(n, capacity=256):
    "A query [D]; keys and values [capacity, D], of which n are valid and the others NaN."
    rng = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(*shape, SIZE, generator=rng) for shape in ((), (capacity,), (capacity,)))
    k[n:] = v[n:] = math.nan
    return [x.to(device) for x in (3 * q, k, v)]


def exact(q, k, v): return attention(*(x.double().cpu().reshape(1, 1, -1, SIZE) for x in (q, k, v)))[0, 0, 0]


@check
def scores(kernel):
    for n in (64, 128, 100):
        q, k, _ = one_head(n)
        out = torch.full((256,), EMPTY, device=device)
        kernel[math.ceil(n / TILE),](q, k, out, SIZE**-0.5, n, D=SIZE, BN=TILE)
        want, got = (k[:n] @ q * SIZE**-0.5).cpu(), out.cpu()
        need(not bool((got == EMPTY).all()), "nothing was stored")
        need(bool((got[n:] == EMPTY).all()), f"with {n} keys it also stores behind the last of them: mask the store")
        need(n <= TILE or not close(got[:TILE], want[:TILE]) or not bool((got[TILE:n] == EMPTY).any()),
             "the second tile is missing: program t begins at key t * BN, in what it loads and in what it stores")
        same(got[:n], want, f"the scores of {n} keys", {
            "multiply by scale": want * SIZE**0.5,
            "every program reads the first tile: program t begins at key t * BN": want[:TILE].repeat(4)[:n]}, 1e-4)
    return "three lengths, one of which fills no tile"


@check
def attend(kernel):
    for n in (64, 192, 100, 1):
        q, k, v = one_head(n)
        out = torch.full((SIZE,), EMPTY, device=device)
        kernel[1,](q, k, v, out, SIZE**-0.5, n, D=SIZE, BN=TILE)
        got, want, s = out.cpu(), exact(q, k[:n], v[:n]), (k @ q * SIZE**-0.5).double().cpu()
        need(not bool((got == EMPTY).all()), "nothing was stored")
        need(n % TILE == 0 or bool(got.isfinite().all()),
             f"with {n} keys the output is not finite: what lies behind the last key must not be used, "
             "neither its score nor its value")
        need(bool(got.isfinite().all()), f"with {n} keys the output is not finite: Z and b_o are still 0, or the first "
             "tile computes e^(-inf + inf)")
        same(got, want, f"the output of {n} keys", known_outputs(s, v.double().cpu(), n), 1e-4)
    return "four lengths, one of which is a single key"


def known_outputs(s, v, n):
    "What typical mistakes of an online softmax give."
    M, Z, o, kept_o, kept_z = -math.inf, 0.0, 0.0, 0.0, 0.0
    for i in range(0, n, TILE):
        t, x = s[i:min(i + TILE, n)], v[i:min(i + TILE, n)]
        larger = max(M, float(t.max()))
        old, e = math.exp(M - larger), (t - larger).exp()
        Z, o, kept_z, kept_o, M = (old * Z + e.sum(), old * o + e @ x, kept_z + e.sum(), kept_o + e @ x, larger)
    return {"divide by Z at the end": o,
            "this is the output of the last tile alone: keep what came before, and M": e @ x / e.sum(),
            "when the largest score grows, what was summed before must shrink, Z and b_o alike": kept_o / kept_z,
            "b_o must shrink too when the largest score grows": kept_o / Z,
            "Z must shrink too when the largest score grows": o / kept_z}


@check
def pages(kernel):
    n, chosen = 250, torch.tensor([3, 0, 2])
    q, k, v = one_head(n)
    w = torch.tensor([1.0, 1.0, 6.0])
    out = torch.full((SIZE,), EMPTY, device=device)
    kernel[1,](q, k, v, chosen.int().to(device), w.log().to(device), out, SIZE**-0.5, n, 3, D=SIZE, BN=TILE)
    keys = (TILE * chosen[:, None] + torch.arange(TILE)).flatten()
    weight = w.repeat_interleave(TILE)[keys < n].double()
    keys = keys[keys < n]

    def output(keys, weight):
        e = (k[keys].double().cpu() @ q.double().cpu() * SIZE**-0.5).exp() * weight
        return e @ v[keys].double().cpu() / e.sum()
    got, want = out.cpu(), output(keys, weight)
    need(not bool((got == EMPTY).all()), "nothing was stored")
    need(bool(got.isfinite().all()), "the output is not finite: the last page of the cache has only 58 valid keys")
    in_order = torch.arange(3 * TILE)
    same(got, want, "the output", {
        "it reads pages 0, 1 and 2: the number of the page is an entry of the list": output(
            in_order, w.repeat_interleave(TILE).double()),
        "it reads pages 0, 1 and 2, and forgets the weights": output(in_order, torch.ones(3 * TILE)),
        "a page of weight w counts w times: add log w to its scores": output(keys, torch.ones(len(keys))),
        "add log w to the scores, do not multiply them by it": multiplied(q, k, v, keys, weight)}, 1e-4)
    return f"pages {chosen.tolist()} of four, the last one sampled, with weight 6"


def multiplied(q, k, v, keys, weight):
    e = (k[keys].double().cpu() @ q.double().cpu() * SIZE**-0.5 * weight.log()).exp()
    return e @ v[keys].double().cpu() / e.sum()


class Machine:
    "A clock, a cache and a call: 10 us if the cache holds its data, 100 us if not, and once a hiccup of 9,000 us."
    def __init__(self): self.now, self.warm, self.calls, self.clears = 0.0, False, 0, 0

    def clock(self): return self.now

    def clear(self):
        self.now, self.warm, self.clears = self.now + 1000e-6, False, self.clears + 1

    def call(self):
        self.calls += 1
        self.now += (10e-6 if self.warm else 100e-6) + 9000e-6 * (self.calls == 5)
        self.warm = True


@check
def cold_time(answer):
    machine = Machine()
    got = result(answer, machine.call, machine.clear, machine.clock, 20)
    need(machine.calls >= 20, f"the call ran {machine.calls} times, 20 were wanted")
    same(got, 100.0, "the time", {
        "this is the time of a warm cache: clear it before each run": 10.0,
        "this is in seconds; give microseconds": 100e-6,
        "clearing is timed, too: look at the clock after it": 1100.0,
        "this is a mean, which one hiccup of 9,000 us has moved: take the median": (20 * 100 + 9000) / 20,
        "the mean of a warm loop, with a hiccup": (20 * 10 + 9000) / 20}, 1e-6)
    return "100 us: cold, without the clearing, and unmoved by one hiccup"


@check
def ratio_of_bytes(answer):
    heads, groups, size = 32, 8, 128
    for n, samples in ((131_072, 128), (4096, 512)):
        dense, keys = 2 * groups * n * size * 2, groups * n * size * 2
        want = dense / (keys + heads * samples * size * 2)
        same(result(answer, n, samples), want, f"the ratio at {n:,} keys and {samples} draws", {
            "SANTA reads all keys: they are half of the bytes": dense / (heads * samples * size * 2),
            "32 query heads draw values of their own; the cache has keys and values of 8 heads":
                dense / (keys + groups * samples * size * 2),
            "bytes of the dense step over those of SANTA, not the other way round": 1 / want}, 1e-6)
    return (f"{answer(131_072, 128):.2f} at 131,072 keys and 128 draws; a reported speedup of attention above this "
            "needs an explanation")
