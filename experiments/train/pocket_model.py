"""How the model of this book was trained, in half an hour on one GPU, and how it was scored"""
import json
import math
import platform
import random
import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from sparse_nb.core.checks import check_choice, check_count
from sparse_nb.pocket import BOS, byte_tokenizer, config, load
from sparse_nb.corpus import HELD_OUT, texts
from sparse_nb.tasks import TASKS, filler_text, make, score


PHASES = ( # each a fresh AdamW with one cosine: peak rate, then (tokens a row, tokens a step, minutes) of each stage
    (1.5e-3, ((1024, 65536, 4.0), (4096, 131072, 6.0), (16384, 131072, 5.6), (32768, 131072, 4.4))),
    (6.0e-4, ((4096, 131072, 2.0), (16384, 131072, 2.0), (32768, 131072, 3.0))))
QUICK_PHASES = ((1.5e-3, ((1024, 4096, 0.1),)),)
SHARES = dict( # of the rows that are tasks
    needle=1, multikey=1, kv=2, multivalue=10, multiquery=2, variable_tracking=3, frequent_words=3)

def _settings(task, rng, length):
    "Easier and harder versions of a task, with many questions about one context"
    asked = max(4, min(32, length // 200))
    if task == "multikey": return dict(keys=asked, questions=asked)
    if task == "kv": return dict(questions=asked)
    if task == "multivalue":
        keys = rng.randint(1, max(3, asked // 3))
        return dict(keys=keys, values=rng.choice((2, 3, 3, 3, 3, 3, 4)), questions=keys)
    if task == "multiquery": return dict(keys=asked + 1, queries=rng.randint(2, 4), questions=max(1, asked // 4))
    if task == "variable_tracking":
        chains = rng.randint(1, asked // 2)
        return dict(chains=chains, copies=rng.choice((1, 2, 3, 3, 3, 4)), questions=chains)
    if task == "frequent_words": return dict(others=rng.randint(6, 24))
    return {}


class Rows(torch.utils.data.IterableDataset):
    "Endless training rows: token ids [L] and the loss weight [L] of each as a target"
    def __init__(self,
        corpus,        # uint8 array, all training text
        length: int,   # tokens of a row
        seed: int,     # of this stream
    ): self.corpus, self.length, self.seed = corpus, length, seed

    def _slice(self, rng, size):
        start = rng.randrange(len(self.corpus) - size)
        return bytes(self.corpus[start:start + size]).decode("ascii")

    def _hay(self, rng, chars): return filler_text(rng, chars) if rng.random() < 0.5 else self._slice(rng, chars)

    def _row(self, rng):
        if rng.random() < 1 / 3: return self._slice(rng, self.length - 1), [1.0] * (self.length - 1)
        task, = rng.choices(list(SHARES), SHARES.values())
        settings, seed = _settings(task, rng, self.length), rng.getrandbits(48)
        build = lambda chars: TASKS[task](random.Random(seed), chars, self._hay, **settings)
        tail = sum(len(q) + len(a) + 2 for q, a in build(int(0.6 * self.length))[1])
        context, pairs = build(self.length - 1 - tail)
        weight = [0.0] * len(context)
        for question, answer in pairs: weight += [0.0] * len(question) + [8.0] * (len(answer) + 2)
        return context + "".join(f"{q} {a}." for q, a in pairs), weight

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed} {info.id if info else 0}")
        while True:
            text, weight = self._row(rng)
            ids, weight = [BOS, *text.encode()], [0.0, *weight]
            yield torch.tensor(ids, dtype=torch.int16), torch.tensor(weight, dtype=torch.float16)


def _optimizer(model):
    "AdamW with weight decay on the matrices, not on norms and the embedding"
    plain = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    decayed = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=plain, weight_decay=0.0)]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=decayed[0].is_cuda)

def _rate(peak, step, share):
    "Learning rate in step `step` of a phase, of whose time `share` has passed"
    return peak * min(1, (step + 1) / 300) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1, share))))

def _step(model, optimizer, ids, weight, rate):
    "One step of training; returns the cross entropy [rows, L - 1] of every next token, in nats"
    for group in optimizer.param_groups: group["lr"] = rate
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model(ids, use_cache=False).logits[:, :-1].float()
    nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    ((nats * weight[:, 1:]).sum() / weight[:, 1:].sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return nats.detach()

def _losses(nats, weight):
    "Mean loss of plain text in bits per byte and of answers in nats; None where a batch has none"
    plain, asked = (nats[m].mean().item() if m.any() else None for m in (weight[:, 1:] == 1, weight[:, 1:] > 1))
    return dict(bits_per_byte=plain and plain / math.log(2), answer_nats=asked)


def _corpus(out, names):
    "All training text as an array in the file system, made if it is not there"
    if not (out / "corpus.bin").exists():
        files, sources = texts(names)
        random.Random(0).shuffle(files)
        (out / "sources.json").write_text(json.dumps([asdict(s) for s in sources], indent=1))
        (out / "corpus.bin").write_text("\n\n".join(files))
    return np.memmap(out / "corpus.bin", dtype=np.uint8, mode="r")

def _begin_or_resume(out, phases, device):
    "Model, optimizer (None at the start of a phase) and state, as the run left them"
    from transformers import LlamaForCausalLM
    torch.manual_seed(0)
    model, optimizer = LlamaForCausalLM(config()).to(device), None
    state = dict(phase=0, stage=0, seconds=0.0, total=0.0, step=0, first=0, tokens=0)
    if (out / "state.pt").exists():
        state = torch.load(out / "state.pt", map_location=device)
        if (there := state.pop("phases")) != phases:
            raise ValueError(f"out must hold a run through the phases {phases}, got one through {there}")
        model.load_state_dict(state.pop("model"))
        if saved := state.pop("optimizer"): (optimizer := _optimizer(model)).load_state_dict(saved)
    return model, optimizer, state

def _batches(corpus, length, tokens, seed, device, workers):
    "Endless batches of rows on `device`: ids and weights [tokens // length, length]"
    gpu = device == "cuda"
    loader = torch.utils.data.DataLoader(Rows(corpus, length, seed), tokens // length, num_workers=workers,
                                         prefetch_factor=4 if workers else None, pin_memory=gpu)
    for ids, weight in loader:
        yield ids.to(device, non_blocking=True).long(), weight.to(device, non_blocking=True).float()


def _stage(model, optimizer, state, peak, stages, corpus, device, workers, late, note):
    "Train until the stage's time is over, or it is late; `note` is told of each step"
    ends = list(accumulate(60 * minutes for *_, minutes in stages))
    length, tokens, _ = stages[state["stage"]]
    clock = time.monotonic()
    for ids, weight in _batches(corpus, length, tokens, state["step"], device, workers):
        rate = _rate(peak, state["step"] - state["first"], state["seconds"] / ends[-1])
        nats = _step(model, optimizer, ids, weight, rate)
        now = time.monotonic()
        state.update(step=state["step"] + 1, tokens=state["tokens"] + ids.numel(),
                     seconds=state["seconds"] + now - clock, total=state["total"] + now - clock)
        clock, over = now, state["seconds"] >= ends[state["stage"]]
        stop = late() or over
        note(length, nats, weight, last=stop)
        if stop: break
    if over: state["stage"] += 1

def train(
    out,                           # folder for corpus, state, log and model; a run found there is resumed
    phases: tuple = PHASES,        # as `PHASES`
    *,
    stop_after: float = math.inf,  # minutes after which this call saves its state and ends
    names: tuple = (),             # packages whose text it reads, as in `texts`
    workers: int = 12,             # processes that make rows
    say=print,                     # gets a line for every 100 steps
) -> Path: # folder of the model as it stands, in bfloat16
    """Train the pocket model by the clock through `phases`, on a GPU if there is one.

    Returns a folder for `pocket.load`. Raises ValueError for a folder with a run through other phases.
    """
    check_count("workers", workers, low=0)
    start, out, device = time.monotonic(), Path(out), "cuda" if torch.cuda.is_available() else "cpu"
    out.mkdir(parents=True, exist_ok=True)
    corpus = _corpus(out, names)
    torch.set_float32_matmul_precision("high")
    model, optimizer, state = _begin_or_resume(out, phases, device)
    if device == "cuda":
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers: layer.compile(dynamic=False)
    late = lambda: time.monotonic() - start > 60 * stop_after

    def note(length, nats, weight, last):
        if state["step"] % 100 and not last: return
        row = dict(step=state["step"], seconds=round(state["total"], 1), tokens=state["tokens"], length=length)
        row |= _losses(nats, weight)
        with (out / "log.jsonl").open("a") as log: log.write(json.dumps(row) + "\n")
        say(" ".join(f"{name} {x}" for name, x in row.items()))

    while state["phase"] < len(phases) and not late():
        peak, stages = phases[state["phase"]]
        if optimizer is None:
            optimizer = _optimizer(model)
            state.update(stage=0, seconds=0.0, first=state["step"])
        _stage(model, optimizer, state, peak, stages, corpus, device, workers, late, note)
        if state["stage"] == len(stages): optimizer, state["phase"] = None, state["phase"] + 1
    weights = dict(model=model.state_dict(), optimizer=optimizer and optimizer.state_dict())
    torch.save(dict(state, phases=phases, **weights), out / "state.pt")
    model.to(torch.bfloat16).save_pretrained(out / "model")
    byte_tokenizer().save_pretrained(out / "model")
    return out / "model"


@torch.inference_mode()
def score_model(
    model,              # a causal language model of transformers
    tokenizer,          # its tokenizer
    task: str,          # one of `tasks.TASKS`
    length: int,        # tokens, answer included
    *,
    prompts: int = 200, # how many, seeds `seed` to `seed + prompts - 1`
    seed: int = 0,      # first seed
    batch: int = 8,     # prompts at once
) -> dict: # task, length, prompts, exact (a count), characters (a mean)
    """Greedy answers to fresh prompts of a task, scored.

    Raises ValueError for an unknown task, no prompts, or a length that the model cannot hold.
    """
    for name, x in (("prompts", prompts), ("batch", batch)): check_count(name, x)
    check_choice("task", task, TASKS)
    check_count("length", length, high=model.config.max_position_embeddings)
    examples = [make(task, length, seed=seed + i, tokenizer=tokenizer) for i in range(prompts)]
    right = []
    for i in range(0, prompts, batch):
        some = examples[i:i + batch]
        inputs = tokenizer([e.prompt for e in some], return_tensors="pt", padding=True).to(model.device)
        new = max(len(tokenizer(f" {e.answer}.")["input_ids"]) for e in some)
        given = dict(attention_mask=inputs.attention_mask, max_new_tokens=new, do_sample=False)
        ids = model.generate(inputs.input_ids, **given)
        written = tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1]:], skip_special_tokens=True)
        right += [score(w, e.answer) for w, e in zip(written, some)]
    return dict(task=task, length=length, prompts=prompts, exact=sum(s.exact for s in right),
                characters=sum(s.characters for s in right) / prompts)


@torch.inference_mode()
def bits_per_byte(
    model,                      # a causal language model with bytes as tokens
    text: str,                  # what to predict
    *,
    window: int = 4096,         # bytes predicted at once, each window from a cold start
    windows: int | None = None, # how many, evenly spread over the text; None is all
) -> list: # one number for each window
    "Cross entropy of a text in bits per byte; raises ValueError for a text shorter than one window"
    data = list(text.encode())
    starts = list(range(0, len(data) - window + 1, window))
    if not starts: raise ValueError(f"text must have at least window = {window} bytes, got {len(data)}")
    if windows: starts = starts[::max(1, len(starts) // windows)][:windows]
    bits = []
    for s in starts:
        ids = torch.tensor([[BOS, *data[s:s + window]]], device=model.device)
        logits = model(ids[:, :-1], use_cache=False).logits[0].float()
        bits.append(F.cross_entropy(logits, ids[0, 1:]).item() / math.log(2))
    return bits


_CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# The pocket model of sparse_nb

A Llama of 7.8 million weights (6 layers, 6 query and 2 key/value heads of 64, hidden 384) that reads bytes and was \
trained to retrieve from up to 32,768 of them. It is a stand-in for a large model in experiments with sparse \
attention, and good for nothing else: it knows no facts and follows no instructions.

## Training

`python -m experiments.run pocket_model`: {minutes:.0f} minutes on one {device}, {steps:,} steps, \
{tokens:.2f} billion tokens, AdamW. A third of the rows are text, the others generated tasks (`sparse_nb.tasks`).

{notes}## Scores

Exact answers, greedy, fresh prompts (seeds {first} to {last}), {dtype}, torch {torch}, transformers {transformers}, \
{date}.

{table}

Held-out text ({held_out}, {windows} windows of 4,096 bytes): {bits:.3f} bits per byte.

## Data

Python source and English documentation of installed packages, {megabytes:.0f} MB, each file once, no further file \
of a package after 12 MiB of it. The licences are those that the packages declare.

| package | version | licence | MB |
|---|---|---|---|
{sources}
"""

def _score_table(rows):
    "Exact answers of each task and length, in Markdown"
    lengths = sorted({r["length"] for r in rows})
    cells = {(r["task"], r["length"]): f"{r['exact']}/{r['prompts']}" for r in rows}
    tasks = dict.fromkeys(task for task, _ in cells)
    lines = [f"| {task} | " + " | ".join(cells[task, n] for n in lengths) + " |" for task in tasks]
    head = "| task | " + " | ".join(f"{n:,} tokens" for n in lengths) + " |"
    return "\n".join([head, "|---" * (len(lengths) + 1) + "|", *lines])

def card(
    scores: Mapping, # as in scores.json
) -> str: # Markdown
    "The model card: what the pocket model is, its data with their licences, its training and its scores"
    meta, last, bits = scores["meta"], scores["log"][-1], scores["bits_per_byte"]
    line = "| {name} | {version} | {licence} | {size:.2f} |"
    sources = [line.format(**s, size=s["bytes"] / 1e6) for s in scores["sources"]]
    return _CARD.format(
        **{name: meta[name] for name in ("device", "dtype", "torch", "transformers", "date")},
        minutes=last["seconds"] / 60, steps=last["step"], tokens=last["tokens"] / 1e9,
        first=meta["seeds"][0], last=meta["seeds"][1], notes="".join(note + "\n\n" for note in scores["notes"]),
        table=_score_table(scores["rows"]), windows=len(bits), bits=sum(bits) / len(bits),
        held_out=", ".join(f"{s['name']} {s['version']}" for s in scores["held_out"]),
        megabytes=sum(s["bytes"] for s in scores["sources"]) / 1e6, sources="\n".join(sources))


LENGTHS = 4096, 16384, 32768 # tokens of the scored prompts
QUICK_LENGTHS = 1024,

def _scores(model, tokenizer, lengths, prompts):
    "Scores on every task and on held-out text"
    import transformers
    rows = [score_model(model, tokenizer, task, length, prompts=prompts, batch=max(1, 400_000 // length))
            for length in lengths for task in TASKS]
    files, held_out = texts(HELD_OUT)
    gpu = torch.cuda.get_device_name() if model.device.type == "cuda" else platform.processor() or platform.machine()
    meta = dict(device=gpu, dtype=str(model.dtype).removeprefix("torch."), date=time.strftime("%Y-%m-%d"),
                torch=torch.__version__, transformers=transformers.__version__, python=platform.python_version(),
                seeds=[0, prompts - 1])
    bits = bits_per_byte(model, "\n\n".join(files), windows=None if prompts > 1 else 2)
    return dict(meta=meta, rows=rows, bits_per_byte=bits, held_out=[asdict(s) for s in held_out])

def pocket_model(recorder):
    """Train the pocket model, or go on with the run in the recorder's folder, score it, and write scores and card.

    Raises as `train`.
    """
    out, quick, say = recorder.out, recorder.quick, recorder.say
    folder = train(out, QUICK_PHASES, names=("transformers",), workers=0, say=say) if quick else train(out, say=say)
    model, tokenizer = load("cuda", torch.bfloat16, folder) if torch.cuda.is_available() else load(folder=folder)
    say("scores")
    scores = _scores(model, tokenizer, *((QUICK_LENGTHS, 1) if quick else (LENGTHS, 200)))
    lines = (Path(out) / "log.jsonl").read_text().splitlines()
    sources = json.loads((Path(out) / "sources.json").read_text())
    scores |= dict(log=[json.loads(line) for line in lines], sources=sources, notes=[])
    (folder / "scores.json").write_text(json.dumps(scores, indent=0))
    (folder / "README.md").write_text(card(scores))
