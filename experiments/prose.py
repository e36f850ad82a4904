"""Bits per byte of long texts of five genres, a window of each: what methods cost that decode, or read, with less"""
from functools import cache, partial
from hashlib import sha1

from sparse_nb.methods.adamas import Adamas
from sparse_nb.methods.quest import Quest
from sparse_nb import Exact, Streaming, TopK
from sparse_nb.delta import Delta
from sparse_nb.grid import load_named
from sparse_nb.text import documents, text_bits, windows

DENSITY = 0.1
LENGTHS = {"pocket": 2048, "smollm2": 1024}  # tokens of a window; the second half is scored
METHODS = {"decode": {"exact": Exact(), "topk": TopK(DENSITY), "streaming": Streaming(4, DENSITY),
                      "quest-16": Quest(DENSITY, 16), "adamas": Adamas(DENSITY)},
           "prefill": {"exact": Exact(), "streaming": Delta(128, 4, 64, "none", tail=0),
                       "Eq. 5": Delta(128, 4, 64, "recompute", tail=0), "Eq. 6": Delta.paper(128, 64, tail=0),
                       "tangent": Delta(128, 4, 64, tail=0)}}
STEPS = ("pocket", "prefill"), ("smollm2", "prefill"), ("pocket", "decode")

load = cache(load_named)

def rows_of(model: str, role: str, genre: str, texts: list) -> list:
    "A row for each text and method: the first window of each text."
    it, tokenizer = load(model)
    length, found = LENGTHS[model], []
    for text in texts:
        rows = text_bits(it, windows(tokenizer, [text], length, 1), METHODS[role], read=length // 2, role=role,
                         every=length)
        found += [dict(model=model, role=role, genre=genre, document=sha1(text.encode()).hexdigest()[:12],
                       method=x.method, bits=round(x.bits, 6), bytes=x.bytes) for x in rows.itertuples()]
    return found

def prose(recorder):
    "Every step of `STEPS`, genre by genre. Raises as `fetch.load`."
    genres = documents(each=1 if recorder.quick else 7)
    if recorder.quick: genres = {"reference": genres["reference"]}
    steps = {f"{model}, {role}, {genre}": partial(rows_of, model, role, genre, texts)
             for model, role in STEPS[:1 if recorder.quick else None] for genre, texts in genres.items()}
    recorder.grow(steps, tokens=LENGTHS, density=DENSITY)
