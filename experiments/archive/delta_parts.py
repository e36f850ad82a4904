"""Several tangents an anchor, and a second-order term, on prose read by both models: bits per byte"""
from dataclasses import dataclass

import torch

from sparse_nb import pocket
from sparse_nb import Exact, Method
from sparse_nb.core.learnt import weights_id
from sparse_nb.core.exact import promote
from sparse_nb.delta import Delta
from sparse_nb.models import fetch
from benchmarks.machine import machine
from sparse_nb.text import speeches, text_bits, windows


ROUNDS = 6  # of k-means

def _far(k, centres): return torch.cdist(k, centres, compute_mode="donot_use_mm_for_euclid_dist")

def key_clusters(
    k: torch.Tensor, # keys [B, G, N, D]
    parts: int,      # clusters
    first: int,      # so many keys, the first, show where the clusters lie
) -> torch.Tensor:   # [B, G, N], int64, from 0 to parts - 1
    "The number of each key's cluster: the nearest centre of a k-means of the first keys. Checks nothing."
    k = promote(k.detach())
    shown = k[:, :, :first]
    numbers = torch.arange(min(parts, shown.shape[2]), device=k.device)
    centres = shown[:, :, numbers * shown.shape[2] // len(numbers)]
    for _ in range(ROUNDS):
        mine = (_far(shown, centres).argmin(-1, keepdim=True) == numbers).mT.to(shown)
        centres = torch.where(mine.any(-1, True), mine @ shown / mine.sum(-1, True).clamp(min=1), centres)
    return _far(k, centres).argmin(-1)


def summaries_of(method, q, k, v, missed, at):
    "log of T e^(-q . kbar), kbar, t and the variance of each part [H, A, P, ...]."
    part = method.part_of_keys(k, missed)
    part = part if len(part) == 1 else part.repeat_interleave(len(q) // len(k), 0)
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    scores = (q[:, at] @ k.mT).masked_fill(~missed, -torch.inf)
    m = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    e, found = (scores - m).exp(), []
    for p in range(method.parts):
        mine = e * (part == p)
        T = mine.sum(-1, keepdim=True)
        mean = lambda x: mine @ x / T.clamp(min=1e-30)
        key = mean(k)
        spread = (mean((k * k).sum(-1, keepdim=True))[..., 0] - (key * key).sum(-1)).clamp(min=0) / k.shape[2]
        found.append(((T.log() + m)[..., 0] - (q[:, at] * key).sum(-1), key, mean(v), spread))
    return [torch.stack(x, 2) for x in zip(*found)]


@dataclass(frozen=True)
class Parted(Method):
    "Delta's tangent with parts, as an experiment: every sequence alone, float32."
    window: int = 128
    gamma: int = 64
    anchors: int = 16
    parts: int = 1
    kind: str = "clusters"   # or "stretches", of each anchor's missing keys
    second: bool = False     # add the second-order term?
    sinks: int = 4

    decode = None

    def part_of_keys(self, k, missed):
        "The part of each key, for each head and anchor, in a shape that broadcasts to [H, A, N]."
        if self.kind == "clusters":
            return key_clusters(k[None], self.parts, self.window)[0, :, None]
        n, i = missed.sum(-1, keepdim=True).clamp(min=1), torch.arange(missed.shape[1])
        return ((i - self.sinks).clamp(min=0) * self.parts // n).clamp(max=self.parts - 1)[None]

    def masses(self, q, at, summaries, rows):
        "For rows of one anchor, the last: log L, with the second-order term if asked for, [H, r, P], and the values."
        a = rows[0] // self.gamma
        first = max(0, a - self.anchors + 1)
        log, key, value, spread = (x[:, first:a + 1] for x in summaries)
        log = log[:, None] + torch.einsum("hrd,hapd->hrap", q[:, rows], key)
        if self.kind == "stretches": number = log.logsumexp(-1).argmax(2, keepdim=True).expand(-1, -1, self.parts)
        else: number = log.argmax(2)
        best = log.gather(2, number[:, :, None])[:, :, 0]
        heads, parts = torch.arange(len(q))[:, None, None], torch.arange(self.parts)
        if self.second:
            far = (q[:, rows, None] - q[:, None, at[first:a + 1]]).square().sum(-1)
            best = best + spread[heads, number, parts] * far.gather(2, number) / 2
        return best, value[heads, number, parts]

    def prefill(self, q, k, v, *, seed=None, scale=None, kv_start=None):
        "Output [1, H, N, D]."
        q, k, v = q[0].float() * (q.shape[3]**-0.5 if scale is None else scale), k[0].float(), v[0].float()
        i = torch.arange(q.shape[1])
        at, out = i[::self.gamma], torch.empty_like(q)
        missed = (i >= self.sinks) & (i <= (at - self.window)[:, None])
        summaries = summaries_of(self, q, k, v, missed, at)
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        for low in at.tolist():
            rows = i[low:low + self.gamma]
            log, value = self.masses(q, at, summaries, rows)
            begin = max(0, low - self.window + 1)
            keys = torch.cat([i[:min(self.sinks, begin)], i[begin:rows[-1] + 1]])
            near = (q[:, rows] @ k[:, keys].mT).masked_fill(keys > rows[:, None], -torch.inf)
            weights = torch.cat([near, log], -1).softmax(-1)
            out[:, rows] = weights[..., :len(keys)] @ v[:, keys] + (weights[..., len(keys):, None] * value).sum(2)
            out[:, low] = ((q[:, [low]] @ k[:, :low + 1].mT).softmax(-1) @ v[:, :low + 1])[:, 0]
        return out[None]


ARMS = {"1 part": {}, "1 part, m = 4": dict(anchors=4), "1 part, m = 64": dict(anchors=64),
        "1 part, γ = 16": dict(gamma=16), "8 stretches": dict(parts=8, kind="stretches"),
        "4 clusters, m = 4": dict(parts=4, anchors=4), "8 clusters, m = 2": dict(parts=8, anchors=2),
        "8 clusters, m = 4": dict(parts=8, anchors=4), "8 clusters": dict(parts=8), "32 clusters": dict(parts=32),
        "1 part, second order": dict(second=True), "8 clusters, second order": dict(parts=8, second=True)}

def loaded(name): return pocket.load() if name == "pocket" else fetch.load(name)

def measure(
    name: str,        # "pocket" or "smollm2"
    w: int,           # keys of the window
    arms=None,        # names in `ARMS`; None: all
    most=None,        # windows of text; None: four for the pocket model, two for SmolLM2
) -> list: # of dicts: model, window, piece, arm, bits
    "Bits per byte of exact attention, streaming and the arms."
    decoder, words = loaded(name)
    given, read = (windows(words, speeches(2015), 2048, 4), 256) if name == "pocket" else (
        windows(words, speeches(2015), 2048, 2), 1024)
    methods = {"exact": Exact(), "streaming": Delta(w, 4, 64, "none", tail=0)}
    methods |= {arm: Parted(w, **ARMS[arm]) for arm in arms or ARMS}
    found = text_bits(decoder, given[:most], methods, read=read, role="prefill", every=2048)
    return [dict(model=name, window=w, piece=int(x.window), arm=x.method, bits=x.bits) for x in found.itertuples()]


def delta_parts(recorder):
    "Bits of every arm on both models. Raises as `fetch.load`."
    quick, rows = recorder.quick, recorder.rows
    wanted = [("pocket", 128)] if quick else [(name, w) for name in ("pocket", "smollm2") for w in (128, 512)]
    for name, w in wanted:
        rows += measure(name, w, ["1 part", "8 clusters, m = 2"] if quick else None, 1 if quick else None)
        recorder.say(f"{name}, window {w}: {len(rows)} rows")
    weights = {name: weights_id(loaded(name)[0]) for name in dict(wanted)}
    return machine("cpu") | dict(weights=weights)
