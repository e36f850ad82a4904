"""A prompt that benches read: what its rows see, the least work of each method, and what some rows should be, by the
equations, in float64"""
from typing import NamedTuple

import torch

from sparse_nb.bench import SHAPES, Shape
from sparse_nb.kernels.sketch_walk_prefill import choose_blocks
from benchmarks.timing import Refused


class Setting(NamedTuple):
    "What rows of a prompt see."
    sinks: int = 4      # first keys, which every row sees
    window: int = 2048  # last keys
    gamma: int = 64     # rows from anchor to anchor
    anchors: int = 16   # summaries that a row chooses from
    tail: int = 128     # last rows, which see everything

CORRECTIONS = "none", "recompute", "delta", "tangent"  # none: window and tail
SKETCHES = {"sketch_walk_10": 0.1, "sketch_walk_20": 0.2}  # lists of blocks: their density
BLOCK = 64                                                 # positions of a block
MOST = 2**18  # positions with all heads
ALLOWED = {"cuda": 2**-8, "cpu": 2**-7}  # error of a row over its length, root mean square of rows

class Prompt:
    "Queries, keys and values of one length."
    def __init__(self, n, device, shape=None, setting=Setting()):
        self.n, self.device, self.setting = n, device, setting
        self.shape = shape or (SHAPES["llama3"] if n <= MOST else Shape(4, 1, 128))
        generator = torch.Generator(device).manual_seed(0)
        new = lambda heads: torch.randn(1, heads, n, self.shape.D, device=device, generator=generator,
                                        dtype=torch.bfloat16)
        self.q, self.k, self.v = new(self.shape.H), new(self.shape.G), new(self.shape.G)


class Work(NamedTuple):
    "Pairs of row and key in a head, each counted once."
    near: int    # sinks and window, of the rows before the tail
    missing: int # the other keys of the anchors
    tail: int    # all keys of the tail
    slope: bool  # does a missing pair add to a mean key, too?

    def tflop(self, shape: Shape) -> float:
        "Operations, in 10**12."
        return 4 * shape.H * shape.D * (sum(self[:3]) + 0.5 * self.missing * self.slope) / 1e12

def needed(n: int, setting: Setting, method: str) -> Work:
    "The least work of a method."
    if method in SKETCHES:
        row, i = torch.arange(n, dtype=torch.int64), torch.arange(-(-n // BLOCK))
        count = torch.ceil((i + 1).double() * SKETCHES[method] * (1 - 1e-12)).long().clamp(min=2).minimum(i + 1)
        return Work(int(((count[row // BLOCK] - 1) * BLOCK + row % BLOCK + 1).sum()), 0, 0, False)
    tail = 0 if method == "streaming" else n if method == "dense" else min(setting.tail, n)
    reach, rows = setting.sinks + setting.window, torch.arange(n, dtype=torch.int64)
    low, last, j = rows[:n - tail], rows[n - tail:], rows[:n - tail:setting.gamma]
    near = torch.minimum(low + 1, reach + (low % setting.gamma if method == "tangent" else low * 0)).sum()
    missing = (j + 1 - reach).clamp(min=0).sum() * (method in ("recompute", "delta", "tangent"))
    return Work(int(near), int(missing), int((last + 1).sum()), method == "tangent")


def chosen(
    p: Prompt,
    method: str, # one of `SKETCHES`
) -> tuple:      # numbers of blocks [1, G, M, S] and how many [1, G, M]
    "The lists that Sketch&Walk makes with its usual index, by mean shares without exact scores."
    return choose_blocks(p.q, p.k, block=BLOCK, density=SKETCHES[method], index="fine4", heads="group", pool="mean")

def listed(
    p: Prompt,
    method: str,        # one of `SKETCHES`
    h: int,             # head
    rows: torch.Tensor, # numbers of queries [r]
) -> torch.Tensor:      # [r, n], bool
    "The keys of the blocks on the rows' lists; whether these lists are right is a matter of the kernels' own tests."
    index, count = (x[0, h * p.shape.G // p.shape.H, rows // BLOCK] for x in chosen(p, method))
    used = torch.arange(index.shape[1], device=index.device) < count[:, None]
    blocks = used.new_zeros(len(rows), -(-p.n // BLOCK) + 1)
    blocks.scatter_(1, torch.where(used, index, blocks.shape[1] - 1).long(), True)
    return blocks[:, :-1].repeat_interleave(BLOCK, 1)[:, :p.n]


class Rows:
    "Some rows of the first and the last head, in float64."
    def __init__(self, prompt, some=20):
        self.p, self.heads, n, s = prompt, (0, prompt.shape.H - 1), prompt.n, prompt.setting
        drawn = torch.randint(n, (some,), generator=torch.Generator().manual_seed(1))
        more = [0, 1, s.gamma, n // 2 // s.gamma * s.gamma, n - s.tail - 1, n - s.tail, n - 1]
        self.rows = torch.cat([drawn, torch.tensor(more).clamp(0, n - 1)]).unique().to(prompt.device)
        self.i, self.scale = torch.arange(n, device=prompt.device), prompt.shape.D**-0.5

    def query(self, h, rows): return self.p.q[0, h, rows].double()

    def over(self, h, rows, seen):
        "log-sum-exp [r], mean value and mean key [r, D] of a head's rows, over the keys that are `seen` [r, n]"
        k, v = (x[0, h * self.p.shape.G // self.p.shape.H].double() for x in (self.p.k, self.p.v))
        scores = (self.query(h, rows) @ k.mT * self.scale).masked_fill(~seen, -torch.inf)
        log = scores.logsumexp(-1)
        weights = torch.exp(scores - log.clamp(min=-1e300)[:, None])
        return log, weights @ v, weights @ k

    def past(self, rows): return self.i <= rows[:, None]
    def anchor(self, rows): return rows // self.p.setting.gamma * self.p.setting.gamma

    def near(self, rows, aligned=False):
        "Sinks and window; aligned: the window of the row's anchor."
        low = (self.anchor(rows) if aligned else rows) - self.p.setting.window + 1
        return self.past(rows) & ((self.i < self.p.setting.sinks) | (self.i >= low[:, None]))


class Truth(Rows):
    "What these rows should be, by the equations."
    def out(self, h, method):
        "What a head's rows should be."
        rows, j = self.rows, self.anchor(self.rows)
        if method in SKETCHES: return self.over(h, rows, self.past(rows) & listed(self.p, method, h, rows))[1]
        if method == "dense": return self.over(h, rows, self.past(rows))[1]
        log, out, _ = self.over(h, rows, self.near(rows, method == "tangent"))
        if method == "streaming": return out
        whole = (rows >= self.p.n - self.p.setting.tail) | ((rows == j) & (method == "recompute"))
        if method == "delta": out = out + self.over(h, j, self.past(j))[1] - self.over(h, j, self.near(j))[1]
        if method == "tangent": out = self.tangent(h, log, out)
        return torch.where(whole[:, None], self.over(h, rows, self.past(rows))[1], out)

    def tangent(self, h, log, out):
        "Rows with the best of their anchors' summaries merged in; log: of their window's sum."
        rows, best, mean = self.rows, torch.full_like(log, -torch.inf), torch.zeros_like(out)
        for back in range(self.p.setting.anchors):
            j = self.anchor(rows) - back * self.p.setting.gamma
            there, j = j >= 0, j.clamp(min=0)
            total, value, key = self.over(h, j, self.past(j) & ~self.near(j, True))
            total = total + self.scale * ((self.query(h, rows) - self.query(h, j)) * key).sum(-1)
            better = there & (total > best)
            best, mean = torch.where(better, total, best), torch.where(better[:, None], value, mean)
        return out + torch.sigmoid(best - log)[:, None] * (mean - out)

    def listed(self, h, pattern):
        "What a head's rows should be over the blocks of a pattern."
        return self.over(h, self.rows, pattern.seen(self.rows)[0, h if pattern.index.shape[1] > 1 else 0])[1]

    def check(self, method):
        """A check of outputs [1, H, n, D]: it returns their error, and raises `Refused` where that is too large.

        method: as `needed` takes them, or a `BlockPattern`.
        """
        out = self.out if isinstance(method, str) else self.listed
        want, allowed = torch.stack([out(h, method) for h in self.heads]), ALLOWED[self.p.device]
        def check(out):
            got = torch.stack([out[0, h, self.rows] for h in self.heads]).double()
            error = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).square().mean().sqrt())
            if not error <= allowed: raise Refused(f"error {error:.3g} of a row's length, allowed is {allowed:.3g}")
            return error
        return check
