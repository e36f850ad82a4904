"""Queries, keys and values of three heads of Qwen2.5-Coder-1.5B-Instruct at the end of one prompt: two with the most
biased keys, and one that looks an answer up"""
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from sparse_nb import pocket
from sparse_nb.core.exact import attention_weights
from sparse_nb.models import fetch
from sparse_nb.models.capturing import capture
from sparse_nb.tasks import make, prompt_texts, prompt_tokens
from benchmarks.recorder import record_path


TASK, SEED, QUERIES = "multikey", 0, 16
LENGTH = 2058  # tokens: 2,048 of the prompt, and room for an answer

def answer_tokens(example, tokenizer, chat: bool) -> range:
    "Where in a prompt the tokens of the answer are."
    text = prompt_texts(example, tokenizer if chat else None)[1]
    begin = text.index(example.answer)
    size = lambda end: len(tokenizer(text[:end], add_special_tokens=not chat).input_ids)
    return range(size(begin), size(begin + len(example.answer)))

def choose(
    layers: list,  # what `capture` caught of one prompt
    answer: range, # positions of the answer in it
) -> list:         # of three (layer, key/value head)
    """The heads to keep: the one with the largest share of the keys' squared length in their mean; of the others the
    one with the largest mean of a channel in units of its deviation; and the one with the largest product of what its
    last queries give to the answer and the share of the squared length that is not in the mean."""
    share, steady, found = {}, {}, {}
    for x in layers:
        q, k = x.q.float(), x.k.float()
        given = attention_weights(q, k, causal=True)[0, :, -1, list(answer)].sum(-1).unflatten(0, (k.shape[1], -1))
        mean, spread = k[0].mean(1), k[0].std(1, correction=0)
        for g in range(k.shape[1]):
            at = x.layer, g
            share[at] = float(mean[g].square().sum() / k[0, g].square().sum(-1).mean())
            steady[at] = float((mean[g].abs() / spread[g]).max())
            found[at] = float(given[g].mean()) * (1 - share[at])
    first = max(share, key=share.get)
    second = max(steady.keys() - {first}, key=steady.get)
    return [first, second, max(found.keys() - {first, second}, key=found.get)]

def qwen_heads(recorder):
    "Capture the heads, and write their file; in the quick form of the pocket model."
    name = "pocket" if recorder.quick else "qwen"
    model, tokenizer = pocket.load() if recorder.quick else fetch.load(name, dtype=torch.bfloat16)
    chat = not recorder.quick
    example = make(TASK, 640 if recorder.quick else LENGTH, seed=SEED, tokenizer=tokenizer, chat=chat)
    ids = torch.tensor([prompt_tokens(example, tokenizer, chat)[1]])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more the sums, and so the last bits, are others
    layers = capture(model, ids, positions=range(-QUERIES, 0))
    torch.set_num_threads(threads)
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
                             pad_token_id=0)
    heads = choose(layers, answer_tokens(example, tokenizer, chat))
    tensors = {}
    for layer, g in heads:
        x, queries = layers[layer], layers[layer].q.shape[1] // layers[layer].k.shape[1]
        parts = dict(q=x.q[0, g * queries:(g + 1) * queries], k=x.k[0, g], v=x.v[0, g])
        tensors |= {f"{layer}.{g}.{part}": t.bfloat16().contiguous() for part, t in parts.items()}
        recorder.say(f"layer {layer}, key/value head {g}")
    known = fetch.MODELS.get(name)
    about = dict(model=known.name if known else name, license=known.license if known else "Apache-2.0", task=TASK,
                 seed=SEED, length=ids.shape[1], answer=example.answer, scale=layers[0].scale,
                 written=tokenizer.decode(written[0, ids.shape[1]:]), heads=" ".join(f"{a}.{b}" for a, b in heads),
                 torch=torch.__version__, transformers=transformers.__version__, command=recorder.command)
    recorder.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, recorder.out, metadata={key: str(x) for key, x in about.items()})

def captured_heads() -> dict: # "layer 0, head 0" -> q [1, 6, 16, 128], k and v [1, 1, 2048, 128], bfloat16
    "The three heads that are in the repository, in the order of `choose`; their scores are scaled by 128^-1/2."
    with safe_open(record_path("qwen_heads"), "pt") as file:
        part = lambda name: (x := file.get_tensor(name)).reshape(1, -1, *x.shape[-2:])
        return {"layer {}, head {}".format(*name.split(".")): tuple(part(f"{name}.{x}") for x in "qkv")
                for name in file.metadata()["heads"].split()}
