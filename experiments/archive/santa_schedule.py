"""How many values each layer draws, learned by REINFORCE on the pocket model and on SmolLM2, beside three
schedules that are not"""
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from sparse_nb.core.exact import exponentials, promote
from sparse_nb import Method
from sparse_nb.core.learnt import weights_id
from sparse_nb.core.streams import fold_in, philox
from sparse_nb.evaluate import bits_of
from sparse_nb.grid import Grid, Worker, crew, failures_of, frame_of, load_named, run
from sparse_nb.hf import attention_override, capture, prefill
from sparse_nb.models.cache import fork_cache
from experiments.answers import stacked
from benchmarks.machine import machine
from experiments.configs.sketch_walk import sized_alike
from sparse_nb.santa import Santa, largest_remainder, variance_trace


def least_sum(
    weights: torch.Tensor, # cost of a single draw in each layer [L], not negative
    total: int,            # samples of all layers together, at least one each
) -> list: # samples of each layer
    "The whole numbers of a given sum, at least 1, with the least sum of weight / samples."
    samples = torch.ones(len(weights), dtype=torch.int64)
    for _ in range(total - len(weights)):
        samples[(weights / samples - weights / (samples + 1)).argmax()] += 1
    return samples.tolist()


def schedule_of(
    theta: torch.Tensor,    # logits [L]
    total: int,             # samples of all layers together
    printed: bool = False,  # as of `reinforce`
) -> list: # samples of each layer
    "The schedule that a policy has learned: its mean, rounded."
    if printed: return largest_remainder(theta.softmax(0), total).clamp(min=1).tolist()
    return (1 + largest_remainder(theta.softmax(0), total - len(theta))).tolist()

def reinforce(
    ask: Callable,      # (schedules, number of the step) -> their rewards
    layers: int,        # L
    total: int,         # samples of all layers together
    *,
    steps: int,         # updates
    episodes: int = 10, # schedules that are tried in a step
    rate: float,        # factor on the gradient
    seed: int = 0,      # of the schedules
    printed: bool = False, # the full multinomial of the paper, or one sample of each layer fixed?
) -> list: # a dict for each step: step, reward (mean of its schedules), theta after it
    """Algorithm 1 of the SANTA paper.

    Its multinomial may give a layer no sample, of which there is no average: `printed` asks with one in its place.
    """
    rng, theta, told = torch.Generator().manual_seed(seed), torch.zeros(layers, dtype=torch.float64), []
    fixed = 0 if printed else 1
    for step in range(steps):
        p, free = theta.softmax(0), total - fixed * layers
        drawn = torch.multinomial(p, episodes * free, replacement=True, generator=rng).view(episodes, free)
        s = torch.nn.functional.one_hot(drawn, layers).sum(1)
        reward = torch.as_tensor(ask((fixed + s).clamp(min=1).tolist(), step), dtype=torch.float64)
        theta = theta + rate * ((reward - reward.mean())[:, None] * (s - free * p)).mean(0)
        told.append(dict(step=step, reward=reward.mean().item(), theta=theta.tolist()))
    return told


class Batch(NamedTuple):
    "Prompts of one size with their answers, read but for the last token"
    seeds: list       # of the prompts
    ids: torch.Tensor # tokens, answers included [b, N]
    prompt: int       # tokens of a prompt
    cache: object     # of the first prompt - 1 tokens

def batches(
    worker: Worker,  # holds the model
    grid: Grid,      # of one task and length
    each: int = 16,  # prompts of a batch
    least: int = 1,  # smaller batches are left out
) -> list: # of `Batch`
    "The prompts of a grid, read exactly."
    found = []
    for (_, prompt, _), (seeds, ids) in sized_alike(grid, worker.tokenizer, worker.chat).items():
        ids = ids.to(worker.model.device)
        for i in range(0, len(seeds), each):
            some = ids[i:i + each]
            if len(some) < least: continue
            cache = prefill(worker.model, some[:, :prompt - 1])
            found.append(Batch(seeds[i:i + each], some, prompt, cache))
    return found


def sampled_values(
    q: torch.Tensor,      # queries of each schedule [s, b, H, T, D]
    k: torch.Tensor,      # their own keys [s, b, G, T, D]
    v: torch.Tensor,      # and values [s, b, G, T, D]
    past: tuple,          # keys and values before them, the same for all schedules [b, G, N, D]
    samples: torch.Tensor, # draws of each schedule [s], int64
    seeds: torch.Tensor,  # streams [s, b, H, T], int64
    scale: float,         # factor on the dot products
) -> torch.Tensor: # [s, b, H, T, D]
    "`santa_decode`, systematic, with a number of samples for each schedule: the keys before are read for all at once."
    (ways, b, H, T, D), (far_k, far_v) = q.shape, past
    G, n = far_k.shape[1], far_k.shape[2]
    grouped = lambda x: x.unflatten(2, (G, H // G)).permute(1, 2, 0, *range(3, x.ndim + 1))  # [b, G, s, R, T, ...]
    first = lambda x: x.permute(1, 2, 0, 3, 4)                                               # [b, G, s, T, D]
    wide, near_v = grouped(promote(q) * scale), first(v)
    far = (wide.flatten(2, 4) @ promote(far_k).transpose(-1, -2)).view(b, G, ways, H // G, T, n)
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    near = (wide @ first(promote(k)).transpose(-1, -2)[:, :, :, None]).masked_fill(later, -torch.inf)
    steps = exponentials(torch.cat([far, near], -1).double())[1]
    steps.cumsum_(-1).div_(steps[..., -1:].clone())
    S, j = samples[:, None, None, None], torch.arange(int(samples.max()), device=q.device)
    x = (j + philox(grouped(seeds)[..., None].contiguous(), 0).double()) / S  # thresholds [b, G, s, R, T, L]
    index = torch.searchsorted(steps, x, right=True).clamp(max=n + T - 1)
    take = lambda x, i: x.gather(-2, i.clamp(min=0)[..., None].expand(*i.shape, D)).reshape(*index.shape, D)
    rows = torch.where(index[..., None] < n, take(far_v, index.clamp(max=n - 1).flatten(2)),
                       take(near_v, (index - n).flatten(3)))
    mean = promote(rows).masked_fill((j >= S)[..., None], 0).sum(-2) / S             # [b, G, s, R, T, D]
    return mean.permute(2, 0, 1, 3, 4, 5).flatten(2, 3).to(q.dtype)


@torch.no_grad()
def _pass(model, batch, schedules, seeds):
    "`forced_answers` in one pass."
    ids, target, ways = batch.ids[:, batch.prompt - 1:-1], batch.ids[:, batch.prompt:], len(schedules)
    b, T = ids.shape
    samples, seeds = (torch.tensor(x, device=ids.device) for x in (schedules, seeds))
    row, query = (torch.arange(x, device=ids.device) for x in (b, T))
    def attend(module, q, k, v, mask, scaling=None, **_):
        i, head = module.layer_idx, torch.arange(q.shape[1], device=q.device)
        own = fold_in(seeds[:, None, None, None], i, row[:, None, None], head[:, None], query)
        past = batch.cache.layers[i].keys, batch.cache.layers[i].values
        q, k, v = (x.unflatten(0, (ways, b)) for x in (q, k, v))
        return sampled_values(q, k, v, past, samples[:, i], own, scaling).flatten(0, 1).transpose(1, 2), None
    with attention_override(model, attend):
        z = model(input_ids=ids.repeat(ways, 1), position_ids=(batch.prompt - 1 + query).expand(ways * b, -1),
                  use_cache=False).logits
    return _told(z, target.repeat(ways, 1), ways)

def _told(z, target, ways):
    "Bits [ways, b] and what is right by logits."
    return torch.stack([bits_of(z, target).sum(1), (z.argmax(-1) == target).all(1).double()]).unflatten(1, (ways, -1))

def forced_answers(
    model,           # a transformers decoder
    batch: Batch,
    schedules: list, # samples of each layer, of s schedules
    seeds: list,     # of the draws of each schedule
    rows: int = None, # answers of a pass, but one schedule's at least; None: 512 on a GPU, 16 on a processor
) -> torch.Tensor: # [2, s, b], float64: bits of each right answer, and is it what greedy decoding writes?
    "The right answers, decoded with sampled values, as many schedules' in a pass as there is room for."
    rows = rows or (512 if batch.ids.is_cuda else 16)
    step = max(1, rows // len(batch.ids))
    return torch.cat([_pass(model, batch, schedules[i:i + step], seeds[i:i + step])
                      for i in range(0, len(schedules), step)], 1)


@torch.no_grad()
def exact_answers(
    model,
    some: list, # of `Batch`
) -> torch.Tensor: # [2, n], as `mean_answers` of one schedule
    "The right answers, decoded with the model's own attention."
    told = [_told(model(input_ids=b.ids[:, b.prompt - 1:-1], past_key_values=fork_cache(b.cache),
                        use_cache=True).logits, b.ids[:, b.prompt:], 1) for b in some]
    return torch.cat(told, 2)[:, 0]

def mean_answers(
    model,
    some: list,      # of `Batch`
    schedules: list, # samples of each layer, of s schedules
    draws: int = 1,  # repetitions with other random numbers, the same for all schedules
    seed: int = 0,   # of the draws
    rows: int = None, # as of `forced_answers`
) -> torch.Tensor: # [2, s, n], bits and right of each prompt, means over draws
    "`forced_answers` of all batches."
    means, tried = [], [s for s in schedules for _ in range(draws)]
    for b in some:
        seeds = [fold_in(seed, b.seeds[0], j) for j in range(draws)] * len(schedules)
        means.append(forced_answers(model, b, tried, seeds, rows).unflatten(1, (len(schedules), draws)).mean(2))
    return torch.cat(means, 2)

def rewards_of(
    model,
    some: list, # of `Batch`; each step takes the next
    seed: int,  # of the draws
) -> Callable: # for `reinforce`: share of the answers that are right
    "Rewards. The schedules of a step are asked the same questions, with random numbers of their own."
    def ask(schedules, step):
        seeds = [fold_in(seed, step, i) for i in range(len(schedules))]
        return forced_answers(model, some[step % len(some)], schedules, seeds)[1].mean(1).tolist()
    return ask


@dataclass(frozen=True)
class Scheduled(Method):
    "SANTA with another number of systematic draws in each layer"
    samples: tuple # of each layer
    scores_all: ClassVar[bool] = True
    random: ClassVar[bool] = True

    def at_layer(self,
        layer: int, # its number
    ) -> Santa:
        "SANTA with the layer's samples."
        return Santa(samples=self.samples[layer])

def rewards_by_jobs(
    folder: Path,    # for the results, a file a step
    on=None,         # as of `grid.run`
    workers: int = None, # likewise
    **settings,      # of `Grid`, but for decode
) -> Callable: # for `reinforce`: share of the answers that are right
    """Rewards from a grid of jobs, with an arm for each schedule and other prompts at each step.

    Asking raises as `grid.run`, and RuntimeError for a job that failed: the next call asks it again.
    """
    def ask(schedules, step):
        arms = {str(i): Scheduled(tuple(s)) for i, s in enumerate(schedules)}
        first = settings.get("seed", 0) + step * settings["prompts"]
        path = Path(folder) / f"step{step}.jsonl"
        if run(Grid(**settings | dict(decode=arms, seed=first)), path, on=on, workers=workers)[1]:
            raise RuntimeError(f"{path}: {failures_of(path)[0][1]}")
        right = frame_of(path).groupby("decode").right.mean()
        return [float(right[name]) for name in arms]
    return ask


class Setting(NamedTuple):
    "What schedules are made from, and what they are judged on"
    model: str        # as of `grid.load_named`
    task: str         # that they are made from
    other: str        # no schedule has seen it
    mean: int         # samples a layer on average
    steps: int        # of REINFORCE
    train: int        # prompts to learn from
    each: int = 16    # prompts of a batch
    least: int = 1    # of a batch to learn from
    prompts: int = 80 # held out, of each task
    draws: int = 3    # repetitions with other random numbers
    length: int = 1024 # tokens of a prompt

    def grid(self,
        task: str,    # as of `grid.task_of`
        prompts: int, # how many
        seed: int = 0, # of the first
    ) -> Grid:
        "Prompts of a task; seeds from 10,000 on are for learning."
        return Grid(self.model, [task], [self.length], {}, prompts=prompts, seed=seed, chat=False)

POCKET = Setting("pocket", "frequent_words:ratio=3", "multivalue", mean=6, steps=80, train=64)
SMOLLM2 = Setting("smollm2", "multikey:keys=2", "needle", mean=4, steps=120, train=320, each=32, least=16)

def layer_traces(
    worker: Worker,
    grid: Grid, # of one task and length
) -> list: # of each layer
    "Expected squared error of one draw at the last token of a prompt, summed over heads, mean over prompts."
    found = []
    for (_, prompt, _), (_, ids) in sized_alike(grid, worker.tokenizer, worker.chat).items():
        for row in ids.to(worker.model.device).split(1):
            q, k, v = stacked(capture(worker.model, row[:, :prompt], positions=[-1]))
            found.append(variance_trace(q, k, v, samples=1, scheme="iid").sum((1, 2)))
    return torch.stack(found).mean(0).tolist()


def measured_schedules(
    worker: Worker,
    s: Setting,
    captured: int = 16, # prompts that variances are measured on
) -> tuple: # name -> (samples, answers that were asked for), rows
    "Uniform, Neyman's from traces, and the best for the losses of one-hot ablations."
    layers, model = worker.model.config.num_hidden_layers, worker.model
    total, some = layers * s.mean, batches(worker, s.grid(s.task, s.train, 10_000), s.each, s.least)
    made = {"uniform": ([s.mean] * layers, 0)}
    traces = layer_traces(worker, s.grid(s.task, min(captured, s.train), 10_000))
    rows = [dict(part="traces", layer=i, trace=x) for i, x in enumerate(traces)]
    made["variances"] = least_sum(torch.tensor(traces), total), 0
    cuts = (None, *range(layers))
    tried = [[1 if i == cut else s.mean for i in range(layers)] for cut in cuts]
    bits, right = (x.mean(1).cpu() for x in mean_answers(model, some, tried, draws=2, seed=1))
    rows += [dict(part="onehot", layer=cut, bits=x, right=y) for cut, x, y in zip(cuts, bits.tolist(), right.tolist())]
    made["one-hot"] = (least_sum((bits[1:] - bits[0]).clamp(min=0), total),
                       2 * (layers + 1) * sum(len(b.seeds) for b in some))
    return made, rows

def learned_schedule(
    worker: Worker,
    s: Setting,
    rate: float = 0.3, # of REINFORCE
    printed: bool = False, # as of `reinforce`
) -> tuple: # name -> (samples, answers that were asked for), rows
    "What REINFORCE makes of the same prompts."
    total, some = worker.model.config.num_hidden_layers * s.mean, batches(
        worker, s.grid(s.task, s.train, 10_000), s.each, s.least)
    layers = total // s.mean
    told = reinforce(rewards_of(worker.model, some, seed=2), layers, total, steps=s.steps, rate=rate, printed=printed)
    asked = sum(len(some[x["step"] % len(some)].seeds) for x in told)
    found = schedule_of(torch.tensor(told[-1]["theta"]), total, printed)
    made = {"REINFORCE as printed" if printed else "REINFORCE": (found, 10 * asked)}
    return made, [dict(part="training", **x) for x in told]


def judged(
    worker: Worker,
    grid: Grid,  # held-out prompts
    made: dict,  # name -> samples of each layer
    draws: int,  # repetitions with other random numbers
    each: int = 16, # prompts of a batch
) -> list: # rows of the part "forced"
    "Loss and share right of every prompt by every schedule, with the same seeds."
    some, rows = batches(worker, grid, each), []
    seeds = [seed for b in some for seed in b.seeds]
    told = torch.cat([exact_answers(worker.model, some)[:, None],
                      mean_answers(worker.model, some, list(made.values()), draws, seed=3)], 1)
    for name, bits, right in zip(["exact", *made], *told.tolist()):
        rows.append(dict(part="forced", task=grid.tasks[0], schedule=name, seeds=seeds,
                         bits=[float(f"{x:.5g}") for x in bits], right=right))
    return rows

def written_answers(
    s: Setting,
    made: dict, # name -> samples of each layer
) -> list: # rows of the part "answers"
    "Answers of the first held-out prompts, written as a grid of jobs."
    grid = replace(s.grid(s.task, min(s.prompts, 32)), decode={x: Scheduled(tuple(n)) for x, n in made.items()})
    path = Path(tempfile.mkdtemp()) / "answers.jsonl"
    run(grid, path)
    return [dict(part="answers", task=s.task, schedule=name, seeds=part.seed.tolist(),
                 right=part.right.astype(int).tolist())
            for name, part in frame_of(path).groupby("decode", sort=False)]


def make_record(recorder, s: Setting, printed: bool = False):
    """All steps of a result; in the quick form two steps of learning, two prompts.

    `printed`: REINFORCE alone, by the full multinomial.
    """
    if recorder.quick: s = s._replace(steps=2, train=2, least=1, prompts=2, draws=1)
    worker = Worker(s.grid(s.task, s.train))
    def schedules(find):
        found, rows = find(worker, s)
        return rows + [dict(part="schedules", schedule=x, samples=n, answers=m) for x, (n, m) in found.items()]
    made = lambda: {row["schedule"]: row["samples"] for row in recorder.rows if row["part"] == "schedules"}
    judge = lambda task: judged(worker, s.grid(task, s.prompts), made(), s.draws, s.each)
    steps = {"measured": partial(schedules, measured_schedules), "learned": partial(schedules, learned_schedule),
             "judged": partial(judge, s.task), "judged_other": partial(judge, s.other),
             "written": lambda: written_answers(s, made())}
    if printed:
        steps["learned"] = partial(schedules, partial(learned_schedule, printed=True))
        for step in "measured", "written": del steps[step]
    recorder.grow(steps, **s._asdict(), weights=weights_id(worker.model))

def santa_schedule(recorder):
    "Learn schedules for the pocket model, and judge them on prompts that none was made from."
    make_record(recorder, POCKET)

def santa_schedule_printed(recorder):
    "The pocket model's schedule by Algorithm 1 as printed, judged on the same prompts."
    make_record(recorder, POCKET, printed=True)

def santa_schedule_smollm2(recorder):
    "The same for SmolLM2."
    make_record(recorder, SMOLLM2)


BY_JOBS = "REINFORCE on Ray"

def learned_by_jobs(
    folder: Path,  # for what each step asks; a file that is there is not asked again
    s: Setting,
    on,            # as of `grid.run`; "ray": one crew for all steps
    say: Callable = print, # hears of each step
    rate: float = 0.3, # of REINFORCE
    workers: int | None = None, # that share the schedules of a step, as of `grid.crew`
) -> tuple: # samples of each layer, rows of the part "training"
    "What REINFORCE makes of prompts that no other step has, each step a grid of jobs. Raises as `grid.run`."
    layers = load_named(s.model)[0].config.num_hidden_layers
    arms, grid = 1 + 10, replace(s.grid(s.task, s.each, 10_000), batch=s.length * s.each)  # exact attention is one
    if workers: grid = replace(grid, together=-(-arms // workers))
    settings = {x.name: getattr(grid, x.name) for x in fields(grid) if x.name != "decode"}
    with crew(workers=workers) if on == "ray" else nullcontext(on) as hands:
        ask = rewards_by_jobs(folder, hands, **settings)
        def heard(schedules, step):
            rewards = ask(schedules, step)
            say(f"step {step}: {sum(rewards) / len(rewards):.3f}")
            return rewards
        told = reinforce(heard, layers, layers * s.mean, steps=s.steps, rate=rate)
    return schedule_of(torch.tensor(told[-1]["theta"]), layers * s.mean), [dict(part="training", **x) for x in told]

def make_record_by_jobs(recorder, s: Setting, workers: int) -> dict:
    """A schedule that is learned on the workers of Ray, and judged; in the quick form two steps, without Ray.

    A folder for the steps of learning stands beside the result, and is gone on with.
    """
    out, on = Path(recorder.out), None if recorder.quick else "ray"
    if recorder.quick: s = s._replace(steps=2, each=2, prompts=2, draws=1)
    samples, rows = learned_by_jobs(out.with_suffix(".steps"), s, on, recorder.say, workers=workers)
    worker, made = Worker(s.grid(s.task, s.train)), {BY_JOBS: samples}
    for task in (s.task, s.other): rows += judged(worker, s.grid(task, s.prompts), made, s.draws, s.each)
    recorder.rows += [*rows, *written_answers(s, made), dict(part="schedules", schedule=BY_JOBS, samples=samples,
                                                             answers=10 * s.steps * s.each)]
    return machine(worker.model.device.type) | s._asdict() | dict(on=on, workers=workers)

def santa_schedule_jobs(recorder):
    "The pocket model's schedule, learned on two workers of Ray, and judged. Raises ImportError where Ray is missing."
    return make_record_by_jobs(recorder, POCKET, workers=2)

def santa_schedule_smollm2_jobs(recorder):
    "The same for SmolLM2, on eleven workers that share GPUs."
    return make_record_by_jobs(recorder, SMOLLM2, workers=11)
