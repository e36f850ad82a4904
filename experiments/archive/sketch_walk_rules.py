"""What a block is made of, what an index keeps of it, and what chooses for a prompt: rules that were tried, at equal
rows"""
import math

import torch
import torch.nn.functional as F

from sparse_nb.attention import attention
from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.double_sparsity import DoubleSparsity
from sparse_nb.methods.quest import Quest
from sparse_nb.core.blocks import BlockPattern, block_attention
from sparse_nb.core.exact import masked_scores
from sparse_nb import Exact, Streaming
from sparse_nb.core.learnt import weights_id
from sparse_nb.evaluate import accuracy, bits_of
from sparse_nb.grid import Grid, Worker
from sparse_nb.hf import attention_override, prefill
from sparse_nb.models.cache import fork_cache
from benchmarks.machine import machine
from experiments.configs.sketch_walk import HARD, sized_alike
from sparse_nb.methods.sketch_walk.index import block_scores, signed_hadamard
from sparse_nb.methods.sketch_walk.lists import in_blocks, prompt_blocks
from sparse_nb.sketch_walk import SketchWalk, heaviest_blocks


def main_direction(
    x: torch.Tensor, # centred rows [..., n, D]
) -> torch.Tensor:   # [..., 1, D]
    "About the first principal direction, by six steps of the power method from the longest row."
    far = x.norm(dim=-1, keepdim=True).argmax(-2, keepdim=True)
    v = x.gather(-2, far.expand(*far.shape[:-1], x.shape[-1]))
    for _ in range(6):
        v = (x @ v.mT).mT @ x
        v = v / v.norm(dim=-1, keepdim=True).clamp(min=1e-9)
    return v

def halved(
    x: torch.Tensor, # keys [G, n, D]
    i: torch.Tensor, # their numbers [G, n]
    unit: int = 64,  # keys that a half is a multiple of, while there are more
) -> torch.Tensor:   # the numbers in the new order [G, n]
    "Halves of halves, down to four keys."
    n = x.shape[1]
    if n <= 4: return i
    c = x - x.mean(-2, keepdim=True)
    order = (c @ main_direction(c).mT)[..., 0].argsort(-1)
    x, i = x.gather(-2, order[..., None].expand_as(x)), i.gather(-1, order)
    if n > unit: half = n // unit // 2 * unit
    else:  # all halves at once
        both = halved(x.unflatten(1, (2, -1)).flatten(0, 1), i.unflatten(1, (2, -1)).flatten(0, 1), unit)
        return both.unflatten(0, (-1, 2)).flatten(1)
    return torch.cat([halved(x[:, :half], i[:, :half], unit), halved(x[:, half:], i[:, half:], unit)], -1)

def sorted_keys(
    k: torch.Tensor, # keys [G, N, D]
    end: int,        # so many whole blocks of 64 are there, but for the first and the last of which all are sorted
    stretch: int,    # keys that are sorted together
) -> torch.Tensor:   # numbers of keys [G, N]
    "An order within stretches."
    i = torch.arange(k.shape[1]).expand(k.shape[:2]).clone()
    for a in range(64, end, stretch):
        part = slice(a, min(a + stretch, end))
        i[:, part] = halved(k[:, part], i[:, part].clone())
    return i


RULES = { # name -> settings, bytes
    "oracle of 64": (dict(kind="truth", block=64), 0), "oracle of 16": (dict(kind="truth", block=16), 0),
    "boxes of 64": (dict(kind="box", fine=64, block=64), 4), "means of 64": (dict(kind="mean", fine=64, block=64), 2),
    **{f"fine4 of {n}": (dict(kind="four", fine=4, block=n), 8.5) for n in (64, 32, 16, 8, 4)},
    **{f"fine4 of {n} each": (dict(kind="four", fine=4, block=n, each=True), 8.5) for n in (64, 4)},
    "fine4 of 64, variance": (dict(kind="variance", fine=4, block=64), 8.75),
    "signs of 4": (dict(kind="sign", block=4), 8.5), "pairs of 4": (dict(kind="two", fine=2, block=4), 9),
    "two bits of 64": (dict(kind="two", fine=1, block=64), 18),
    "two bits of 4": (dict(kind="two", fine=1, block=4), 18),
    "sorted, oracle of 64": (dict(kind="truth", block=64, stretch=4096), 0),
    "sorted, means of 64": (dict(kind="mean", fine=64, block=64, stretch=4096), 2),
    "sorted, fine4 of 64": (dict(kind="four", fine=4, block=64, stretch=4096), 8.5),
    "sorted in 512, fine4 of 64": (dict(kind="four", fine=4, block=64, stretch=512), 8.5)}

def kept(
    rule: dict,      # as in `RULES`
    k: torch.Tensor, # keys [G, n, D]
) -> torch.Tensor:   # [G, n / fine, D]
    "What the index knows of sub-blocks, turned back."
    x, turn = k.unflatten(1, (-1, rule.get("fine", 1))).mean(2), signed_hadamard(k.shape[-1], None).to(k)
    if rule["kind"] in ("truth", "mean"): return x
    x = x @ turn
    if rule["kind"] in ("four", "variance"):
        step = (x.abs().amax(-1, keepdim=True) / 7).bfloat16().to(x)
        x = (x / step.clamp(min=1e-12)).round().clamp(-7, 7) * step
    elif rule["kind"] == "two":  # the best four levels for a normal number
        size = x.square().mean(-1, keepdim=True).sqrt().bfloat16().to(x)
        x = torch.where(x.abs() > 0.9816 * size, 1.51, 0.4528) * x.sign() * size
    else:                        # signs, with a size for four keys
        size = x.abs().unflatten(1, (-1, 4)).mean((2, 3)).bfloat16().to(x).repeat_interleave(4, 1)
        x = x.sign() * size[..., None]
    return x @ turn.mT

def rule_scores(
    rule: dict,      # as in `RULES`
    q: torch.Tensor, # scaled queries [G, Q, D]
    k: torch.Tensor, # keys [G, n, D]
) -> torch.Tensor:   # [G, Q, n / block]
    "A guess of the logarithm of each block's weight."
    fine = rule.get("fine", 1)
    if rule["kind"] == "box":
        x = k.unflatten(1, (-1, fine))
        return q.clamp(min=0) @ x.amax(2).mT + q.clamp(max=0) @ x.amin(2).mT
    z = q @ kept(rule, k).mT
    if rule["kind"] == "variance":
        x = k.unflatten(1, (-1, fine))
        spread = (x - x.mean(2, keepdim=True)).square().sum(-1).mean(-1) / k.shape[-1]
        z = z + q.square().sum(-1, keepdim=True) * spread[:, None] / 2
    return z.unflatten(-1, (-1, rule["block"] // fine)).logsumexp(-1) + math.log(fine)


def read_by(
    rule: dict,       # as in `RULES`
    density: float,   # share of the blocks of 64
    q: torch.Tensor,  # queries [H, Q, D], the last positions
    k: torch.Tensor,  # keys [G, N, D]
    scale: float,     # factor on the dot products
    orders: dict,     # of the layer: stretch -> order of the context's keys
) -> torch.Tensor:    # which keys are read [G, R or 1, Q, N], bool
    """The keys that a rule reads: as many as the density's blocks of 64 hold.

    The first 64, and those from the first query's own block on, are read and counted.
    """
    Q, (G, N, _), size = q.shape[1], k.shape, rule["block"]
    place, last = torch.arange(N - Q, N), (N - Q) // 64 * 64
    q = q.unflatten(0, (G, -1)) * scale
    order = torch.arange(N).expand(G, -1)
    if stretch := rule.get("stretch"):
        if stretch not in orders: orders[stretch] = sorted_keys(k, last - 64, stretch)
        order = torch.cat([orders[stretch][:, :last], order[:, last:]], 1)
    near = (q @ k[:, None, last:].mT).masked_fill(torch.arange(last, N) > place[:, None], -math.inf)
    z = rule_scores(rule, q.flatten(1, 2), k.gather(1, order[..., None].expand_as(k))[:, :last]).unflatten(1, (-1, Q))
    share = torch.cat([z, near.logsumexp(-1, keepdim=True)], -1).softmax(-1)[..., :-1]
    if not rule.get("each"): share = share.mean(1, keepdim=True)
    share = share.masked_fill(torch.arange(last // size) < 64 // size, math.inf)
    blocks = place // 64 + 1
    count = (density * blocks - 1e-9).ceil() - (blocks - last // 64)
    chosen = share.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1) < \
        count.clamp(min=1)[:, None] * (64 // size)
    chosen = chosen.repeat_interleave(size, -1)
    far = torch.zeros_like(chosen).scatter(-1, order[:, None, None, :last].expand_as(chosen), chosen)
    return torch.cat([far, (torch.arange(last, N) <= place[:, None]).expand(*far.shape[:3], -1)], -1)


@torch.no_grad()
def rule_losses(
    grid: Grid,       # of one task and length; what it decodes with is not asked
    rules: dict,      # name -> settings, bytes
    densities: tuple, # shares of the blocks
    worker: Worker,   # of the grid's model
) -> list: # of dicts: task, seed, rule, density, nll
    "Loss of the right answer of each prompt, in nats a token; rule None and density 1 is exact attention."
    model, rows = worker.model, []
    for (context, prompt, _), (seeds, tokens) in sized_alike(grid, worker.tokenizer, worker.chat).items():
        for seed, ids in zip(seeds, tokens.split(1)):
            cache, orders = prefill(model, ids[:, :context], chunk=context), {}
            for name, density in [(None, 1.0), *((name, x) for name in rules for x in densities)]:
                def attend(module, query, key, value, mask, scaling=None, **_):
                    q, k, i = query[0], key[0], module.layer_idx
                    z = (q.unflatten(0, (len(k), -1)) @ k[:, None].mT) * scaling
                    if name is None or i < 2:
                        read = torch.ones(z.shape[-2:], dtype=torch.bool).tril(z.shape[-1] - z.shape[-2])
                    else: read = read_by(rules[name][0], density, q, k, scaling, orders.setdefault(i, {}))
                    out = z.masked_fill(~read, -math.inf).softmax(-1) @ value[0, :, None]
                    return out.flatten(0, 1).transpose(0, 1)[None], None
                with attention_override(model, attend):
                    logits = model(input_ids=ids[:, context:-1], past_key_values=fork_cache(cache), use_cache=True,
                                   logits_to_keep=ids.shape[1] - prompt).logits
                nll = float(bits_of(logits, ids[:, prompt:]).mean()) * math.log(2)
                rows.append(dict(task=grid.tasks[0], seed=seed, rule=name, density=density, nll=float(f"{nll:.5g}")))
    return rows


EACH, MORE = dict(pool="max", heads="each", refine=1), dict(density=0.17, least=3)
PROMPT_RULES = { # name -> settings of `SketchWalk`
    "fine4": dict(pool="mean", refine=1), "fine16 max each": dict(index="fine16", **EACH),
    "oracle max each": dict(index="oracle", **EACH),
    "fine16 max each refined": EACH | dict(index="fine16", refine=2)}
PROMPT_RULES |= {f"{name}, 3 at least": x | MORE for name, x in PROMPT_RULES.items()}
PROMPT_RULES |= {
    "fine16 max refined, 3 at least": dict(index="fine16", refine=2, pool="max", **MORE),
    "oracle max, 3 at least": dict(index="oracle", pool="max", refine=1, **MORE)}
MIXED = { # name -> queries averaged, index of the scores, of what they are divided by; None: every key
    "4 rows averaged": (4, None, None), "16 rows averaged": (16, None, None), "keys of fine4": (1, "fine4", "fine4"),
    "keys of fine16": (1, "fine16", "fine16"), "fine16 divided by exact": (1, "fine16", None)}

def row_scores(
    q: torch.Tensor,    # queries of a prompt [1, H, N, D]
    k: torch.Tensor,    # keys [1, G, N, D]
    rows: int,          # queries that are averaged first
    index: str | None,  # one of `INDEXES`; None: every key
    scale: float,       # factor on the dot products
) -> torch.Tensor:      # [1, H, R, 64 / rows, M], log-weights; -inf for what is not seen, and where no query is
    "What means of queries give to blocks."
    s, N = SketchWalk(index=index or "oracle"), q.shape[2]
    prompt = prompt_blocks(s, q, k, torch.zeros(1, dtype=torch.int64))
    blocks, there = prompt.shown.shape[2], prompt.real.unflatten(3, (-1, rows)).sum(4)
    x = in_blocks(q, blocks, 64).unflatten(3, (-1, rows)).sum(4) / there.clamp(min=1)
    if index is None:
        end = (torch.arange(x.shape[2] * x.shape[3]) * rows + rows).clamp(max=N)
        z = masked_scores(x.flatten(2, 3), k, 0, torch.zeros_like(end)[None, None], end[None, None], scale)
        z = F.pad(z, (0, blocks * 64 - N), value=-math.inf).unflatten(-1, (blocks, 64)).logsumexp(-1)
    else: z = block_scores(s.summary, x.flatten(2, 3), s.summary(in_blocks(k, blocks, 64), prompt.shown), scale)
    return z.unflatten(2, x.shape[2:4]).masked_fill(~prompt.visible[:, :, :, None] | (there == 0), -math.inf)

def mixed_lists(
    q: torch.Tensor, # as in `row_scores`, like the next two
    k: torch.Tensor,
    scale: float,
    rows: int,       # as in `MIXED`, like the next two
    index: str | None,
    by: str | None,
) -> torch.Tensor:   # [1, H, R, M], bool
    "Lists by the largest share of a row."
    z, s = row_scores(q, k, rows, index, scale), SketchWalk(**MORE)
    total = (z if by == index else row_scores(q, k, rows, by, scale)).logsumexp(-1, keepdim=True)
    prompt = prompt_blocks(s, q, k, torch.zeros(1, dtype=torch.int64))
    share = (z - total).nan_to_num(nan=-math.inf).amax(3)
    return heaviest_blocks(share, prompt.visible, prompt.forced, s.density, s.least)


@torch.no_grad()
def prompt_losses(
    grid: Grid,     # of one task and length; what it reads with is not asked
    worker: Worker, # of the grid's model
    few: int,       # prompts that `MIXED` are asked, the first ones
) -> list: # of dicts: task, seed, rule, blocks (of a list, mean), right, nll
    "Answers to prompts that lists have read; the answer's own tokens attend exactly. Rule None is exact attention."
    model, rows = worker.model, []
    for (_, n, _), (seeds, tokens) in sized_alike(grid, worker.tokenizer, worker.chat).items():
        for seed, ids in zip(seeds, tokens.split(1)):
            for name in (None, *PROMPT_RULES, *(MIXED if seed < grid.seed + few else ())):
                sizes = []
                def attend(module, query, key, value, mask, scaling=None, **_):
                    if name is None or module.layer_idx < 2:
                        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling,
                                                             enable_gqa=True)
                        return out.transpose(1, 2), None
                    q, k, v = (x[:, :, :n] for x in (query, key, value))
                    if name in MIXED:
                        pattern = BlockPattern.from_mask(mixed_lists(q, k, scaling, *MIXED[name]), queries=n, keys=n,
                                                         query_block=64, key_block=64)
                    else: pattern = SketchWalk(**PROMPT_RULES[name]).pattern(q, k, scale=scaling)
                    sizes.append(float(pattern.mask().sum(-1).float().mean()))
                    out = [block_attention(q, k, v, pattern, scale=scaling),
                           attention(query[:, :, n:], key, value, causal=True, scale=scaling)]
                    return torch.cat(out, 2).transpose(1, 2), None
                with attention_override(model, attend):
                    logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=ids.shape[1] - n).logits
                right = bool((logits.argmax(-1) == ids[:, n:]).all())
                nll = float(bits_of(logits, ids[:, n:]).mean()) * math.log(2)
                rows.append(dict(task=grid.tasks[0], seed=seed, rule=name, blocks=round(sum(sizes) / 4, 3),
                                 right=right, nll=float(f"{nll:.5g}")))
    return rows


def baseline_arms(
    length: int, # tokens of a prompt
) -> dict:       # name -> method
    "A tenth of the blocks, and as many keys by baselines."
    keys = math.ceil(length / 64 / 10) * 64
    return {"fine4": SketchWalk(density=0.1), "quest-32": Quest(keys, 32), "adamas": Adamas(keys),
            "double sparsity": DoubleSparsity(keys), "streaming": Streaming(4, keys - 4)}

def add_baselines(recorder) -> dict:
    "Evaluate the pocket model with baselines; what meta says of it."
    length, prompts = (700, 1) if recorder.quick else (4096, 20)
    worker, arms = Worker(Grid("pocket", ["kv"], [length], {})), baseline_arms(length)
    apart = {name: (lambda i, m=m: Exact() if i < 2 else m) for name, m in arms.items()} | {"exact": Exact()}
    for task in HARD[1:2] if recorder.quick else HARD[1:3]:
        found = accuracy(worker.model, worker.tokenizer, task, length, apart, prompts=prompts, batch=2, setup="B")
        recorder.rows += [dict(part="rivals", task=task, length=length, seed=x.seed, method=x.method,
                               exact=bool(x.exact)) for x in found.itertuples()]
        recorder.say(f"{task}: {len(recorder.rows)} rows, with rivals")
    return machine("cpu") | dict(weights=weights_id(worker.model), model="pocket", length=length,
                                 bytes={name: m.index_bytes(64) for name, m in arms.items()})


def sketch_walk_rules(recorder):
    "Losses of every rule, and the answers of baselines. Raises as `fetch.load`."
    quick, rows, worker = recorder.quick, recorder.rows, None
    name, length, prompts = ("pocket", 700, 1) if quick else ("smollm2", 2048, 8)
    rules = dict(list(RULES.items())[-3:]) if quick else RULES
    for task in ("kv",) if quick else ("needle", "multikey:keys=2"):
        grid = Grid(name, [task], [length], {}, prompts=prompts, seed=1000)
        worker = worker or Worker(grid)
        rows += rule_losses(grid, rules, (0.3,) if quick else (0.1, 0.2), worker)
        recorder.say(f"{task}: {len(rows)} rows")
    about = dict(weights=weights_id(worker.model), model=name, length=length)
    about |= dict(bytes={x: y for x, (_, y) in rules.items()})
    return machine("cpu") | about | dict(rivals=add_baselines(recorder))


def sketch_walk_rules_prompts(recorder):
    "Answers of every rule for prompts, three facts on the pocket model."
    length, prompts, few = (700, 1, 1) if recorder.quick else (2048, 200, 12)
    grid = Grid("pocket", ["multivalue"], [length], {}, prompts=prompts)
    worker = Worker(grid)
    recorder.rows += prompt_losses(grid, worker, few)
    return machine("cpu") | dict(weights=weights_id(worker.model), length=length)
