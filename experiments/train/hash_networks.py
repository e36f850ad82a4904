"""How the bits of [HashAttention](../../nbs/07_heavy_keys.ipynb) are trained, and the record that makes the file
of the package"""
import math
from functools import partial

import torch

from sparse_nb import pocket
from sparse_nb.core.checks import check_count
from sparse_nb.core.exact import promote
from sparse_nb.hash_attention import BITS, PARTS, network_outputs, save_networks
from sparse_nb.hf import capture
from sparse_nb.tasks import TASKS, make


def _start(like, w1, w2):
    """Networks that begin with these weights [heads, ...] on vectors scaled to mean 0 and spread 1 in each channel, as
    those of `like` [heads, n, D] then are.
    """
    w1 = w1.to(like) / like.std(1, keepdim=True).clamp(min=1e-6).transpose(1, 2)
    w2 = w2.to(like)
    return [w1, -(like.mean(1, keepdim=True) @ w1)[:, 0], w2, w2.new_zeros(len(w2), BITS)]

def _networks(examples, hidden, g):
    "Networks of keys and queries to begin with; a query head begins with the weights of its keys."
    few = examples[:16]
    q, k, _ = few[0]
    heads, groups, size = len(q), len(k), q.shape[2]
    w1, w2 = (torch.randn(groups, size, hidden, generator=g) * size**-0.5,
              torch.randn(groups, hidden, BITS, generator=g) * (2 / hidden)**0.5)
    return {side: _start(torch.cat([promote(x[i]) for x in few], 1), *(w.repeat_interleave(n, 0) for w in (w1, w2)))
            for side, i, n in (("k", 1, 1), ("q", 0, heads // groups))}


RATE = 0.01  # peak learning rate
MASS = 0.25  # part of the target that is the attention itself; the rest is spread evenly over the heavy keys

def _products(x, y):
    "Dot products of queries x [H, Q, D] and the keys y [G, N, D] of their groups [H, Q, N]."
    return (x.reshape(len(y), -1, x.shape[2]) @ y.transpose(1, 2)).reshape(*x.shape[:2], -1)

def _target(score, count, scale):
    "What the softmax should be [H, Q, N]: spread over the `count` [Q] largest scores, and partly the attention itself."
    largest = score.topk(int(count.max())).values
    heavy = score >= largest.gather(-1, (count - 1)[:, None].expand(len(score), -1, -1))
    return (1 - MASS) * heavy / heavy.sum(-1, keepdim=True) + MASS * (score * scale).softmax(-1)

def fit_maps(
    examples: list,             # of a layer, one a prompt: queries [H, Q, D], keys [G, N, D], places of the queries [Q]
    *,
    hidden: int = 64,           # width of the networks M
    steps: int = 3000,          # of Adam, each on one prompt
    queries: int = 16,          # of the prompt in a step
    share: tuple = (0.01, 0.1), # a key is heavy if among this share of the visible ones, drawn from here in each step
    seed: int = 0,              # of the start, the prompts, the queries and the shares
    progress=None,              # called as `progress(step, loss)`
) -> dict:                      # as from `hash_maps`
    """Train the networks of a layer: cross-entropy of a softmax over the visible keys, of products of bits.

    The bits begin as a soft tanh and harden to signs. ValueError for no examples.
    """
    if not examples: raise ValueError("examples must hold a prompt, got none")
    for name, x in (("hidden", hidden), ("steps", steps), ("queries", queries)): check_count(name, x, 1)
    g = torch.Generator().manual_seed(seed)
    nets = _networks(examples, hidden, g)
    heads, size = examples[0][0].shape[::2]
    gain = torch.full((heads, 1, 1), math.log(0.2), device=examples[0][0].device)
    weights = [*nets["k"], *nets["q"], gain]
    for x in weights: x.requires_grad_()
    adam = torch.optim.Adam(weights, RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, RATE, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        q, k, at = examples[int(torch.randint(len(examples), (), generator=g))]
        some = torch.randperm(len(at), generator=g)[:queries].to(at.device)
        q, k, visible = promote(q[:, some]), promote(k), at[some] + 1
        low, high = share
        count = (low * (high / low)**float(torch.rand((), generator=g)) * visible).ceil().long()
        unseen = torch.arange(k.shape[1], device=k.device) >= visible[:, None]
        target = _target(_products(q, k).masked_fill(unseen, -math.inf), count, size**-0.5)
        soft_q, soft_k = (torch.tanh(5**(step / steps) * network_outputs(x, *nets[side]))
                          for x, side in ((q, "q"), (k, "k")))
        logit = (gain.exp() * _products(soft_q, soft_k)).masked_fill(unseen, -math.inf)
        loss = -(target * logit.log_softmax(-1).masked_fill(unseen, 0)).sum(-1).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
        if progress: progress(step, float(loss.detach()))
    return {part: x.detach().float() for part, x in zip(PARTS, [*nets["k"], *nets["q"]])}


def hash_examples(
    model,            # a transformers decoder
    prompts,          # token ids of each prompt, a list of tensors [N]
    *,
    last: int = 48,   # queries to learn from at the end of each prompt
    others: int = 48, # further ones, drawn from the last 7/8 of it
    seed: int = 0,    # of this draw
) -> dict:            # layer -> list of examples, as for `fit_maps`
    """What `model` asks and where it looks while it reads `prompts`.

    ValueError for a prompt too short for so many queries.
    """
    found, g = {}, torch.Generator().manual_seed(seed)
    for ids in prompts:
        n = len(ids)
        if n - n // 8 < last + others:
            raise ValueError(f"prompts must be long enough for {last + others} queries in the last 7/8 of each, got "
                             f"one of {n} tokens")
        at = n // 8 + torch.randperm(n - n // 8 - last, generator=g)[:others]
        for x in capture(model, ids.to(model.device), positions=[*at.sort().values.tolist(), *range(n - last, n)]):
            found.setdefault(x.layer, []).append((x.q[0], x.k[0], x.positions.to(x.k.device)))
    return found

def train_hash(
    model,            # a transformers decoder
    prompts,          # token ids of each prompt, a list of tensors [N]
    *,
    last: int = 48,   # as in `hash_examples`
    others: int = 48, # as in `hash_examples`
    seed: int = 0,    # of everything drawn
    progress=None,    # called as `progress(layer, step, loss)`
    **settings,       # for `fit_maps`
) -> dict:            # `layer.part` -> tensor, float16
    "Networks for every layer of `model`, for `save_networks`. Raises as `hash_examples` and `fit_maps`."
    found = {}
    for layer, examples in hash_examples(model, prompts, last=last, others=others, seed=seed).items():
        told = partial(progress, layer) if progress else None
        found |= {f"{layer}.{part}": x.half().contiguous().cpu()
                  for part, x in fit_maps(examples, seed=seed, progress=told, **settings).items()}
    return found


PROMPTS = 14      # of each task, with their answers
FIRST_SEED = 100_000
LENGTHS = 600, 1024, 2048, 4096, 8192, 16384, 32768  # tokens, in turn
STEPS = 3000

def hash_networks(recorder):
    "Train the networks of HashAttention for the pocket model, and write their file (`save_networks`)."
    quick, say = recorder.quick, recorder.say
    model, tokenizer = pocket.load("cuda" if torch.cuda.is_available() else "cpu")
    lengths, prompts, steps = (LENGTHS[:1], 1, 20) if quick else (LENGTHS, PROMPTS, STEPS)
    examples = [make(task, lengths[i % len(lengths)], seed=FIRST_SEED + i, tokenizer=tokenizer)
                for i in range(prompts) for task in TASKS]
    ids = [tokenizer(f"{x.prompt} {x.answer}", return_tensors="pt").input_ids[0] for x in examples]
    losses = []
    def tell(layer, step, loss):
        losses.append(loss)
        if (step + 1) % (steps // 5) == 0:
            say(f"layer {layer}, step {step + 1}: loss {sum(losses[-steps // 5:]) * 5 / steps:.4f}")
    save_networks(train_hash(model, ids, steps=steps, queries=32, progress=tell), recorder.out, model)
