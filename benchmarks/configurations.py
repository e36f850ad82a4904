"""At which settings each method stands in the one table: a tenth of the keys where a share is chosen"""
from typing import NamedTuple

from sparse_nb.core.registry import METHODS

MODELS = {"pocket": "pocket (8M)", "smollm2": "SmolLM2 (135M)", "qwen": "Qwen2.5-Coder (1.5B)"}  # the largest last
PLACES = {"32k": (32768, 1), "131k": (131072, 1), "524k": (524288, 1), "32k_8": (32768, 8)}  # keys and sequences
LENGTHS = {"32k": 32768, "131k": 131072, "524k": 524288, "1M": 1048576}


class Decode(NamedTuple):
    "A method that decodes, at the settings that are timed"
    label: str
    settings: dict      # those that tell it from others, its class among them
    asked: tuple = ()   # settings that answers are taken of where there are none of those, the most alike first
    kernel: tuple = ()  # record and values of the rows of its whole step
    at: dict = {}       # number of keys -> settings that change with it
    of: str = ""        # a second configuration of this method; "": the first

class Prompt(NamedTuple):
    "A method that reads prompts, at the settings that are evaluated"
    label: str
    settings: dict
    asked: tuple = ()  # as of `Decode`
    kernel: str = ""   # its name in the record `prefill`
    first: tuple = ()  # its name in the record `first_token`, and one for as long as that is not there
    other: dict = {}   # settings of `kernel` and of the latter, if they are others


def _choice(kind): return "choose", dict(method=kind, launch="attend")

_LAUNCHED = dict(launch="merge", memory="device")
_VATTENTION = dict(method="VAttention", delta=0.1, sinks=128, window=128, topk=0.05, base=0.025, predictor=dict(
    method="HashAttention", budget=0.05, maps="random"))
_HASH = dict(method="HashAttention", budget=0.1)
_PLAIN = dict(plugin="plain")
SANTA = dict(method="Santa", samples=128, scheme="systematic", eps=None, keys="exact")
_SAAP = dict(method="Saap", clusters=128, tail="first_order")
_QUEST = dict(method="Quest", budget=0.1, page=16)
_WALK = dict(method="SketchWalk", block=64, index="fine4", heads="group", walk=None)
_DECODED = dict(method="VAttention", eps=0.1, delta=0.05, topk=0.05, base=0.01, predictor=dict(
    method="Adamas", budget=0.1))
DECODE = {
    "exact": Decode("exact attention", dict(method="Exact")),
    "santa": Decode("SANTA, 128 draws", SANTA, (SANTA | dict(samples=64),), ("decode", dict(
        method="santa_systematic", mode="graph", H=32, B=1, samples=128))),
    "santa_int8": Decode("SANTA, 128 draws, int8 keys", SANTA | dict(keys="int8"), of="santa"),
    "vattention": Decode("vAttention, 10 %, random maps", _VATTENTION, (_VATTENTION | dict(eps=0.3) | _PLAIN,), (
        "vattention", dict(density=0.1, **_LAUNCHED)), {32768: dict(eps=0.3) | _PLAIN, 131072: dict(
            eps=0.15) | _PLAIN, 524288: dict(eps=0.1)}),
    "vattention_adamas": Decode("vAttention over Adamas, eps 0.1", _DECODED, of="vattention"),
    "vattention_eps": Decode("vAttention, eps 0.1, random maps", _VATTENTION | dict(eps=0.1, plugin="upper"),
                             of="vattention"),
    "saap": Decode("SAAP, 5 % of keys", _SAAP | dict(budget=0.05),
                   (_SAAP | dict(budget=0.1),), ("saap_launches", dict(H=32, **_LAUNCHED))),
    "saap_10": Decode("SAAP, 10 % of keys", _SAAP | dict(budget=0.1), of="saap"),
    "sketch_walk": Decode("Sketch&Walk, 10 % of blocks", _WALK | dict(density=0.1, pool="mean"), (), (
        "sketch_walk_launches", dict(H=32, index="fine4", block=64, heads="group", asked=0.1, **_LAUNCHED))),
    "streaming": Decode("window, 10 %", dict(method="Streaming", sinks=128, window=0.1)),
    "streaming_4": Decode("window, 10 %, 4 sinks", dict(method="Streaming", sinks=4, window=0.1), of="streaming"),
    "quest": Decode("Quest, 10 %", _QUEST, (), _choice("Quest")),
    "adamas": Decode("Adamas, 10 %", dict(method="Adamas", budget=0.1), (), _choice("Adamas")),
    "double_sparsity": Decode("Double Sparsity, 10 %", dict(method="DoubleSparsity", budget=0.1, channels=16,
                                                            chosen=None), (), _choice("DoubleSparsity")),
    "hash_attention": Decode("HashAttention, 10 %, random maps", _HASH | dict(maps="random"),
                             kernel=_choice("HashAttention")),
    "hash_attention_learned": Decode("HashAttention, 10 %, learned maps", _HASH | dict(maps="pocket"),
                                     of="hash_attention"),
    "one_list": Decode("Quest, 10 %, one list a group", dict(method="OneList", guess=_QUEST)),
    "magicpig": Decode("MagicPIG, 8 bits", dict(method="MagicPIG", bits=8, tables=32)),
    "magicpig_6": Decode("MagicPIG, 6 bits", dict(method="MagicPIG", bits=6, tables=42), of="magicpig"),
    "reformer": Decode("Reformer, 32 bins", dict(method="Reformer", bins=32)),
    "kdeformer": Decode("KDEformer, 32 bins", dict(method="KDEformer", bins=32)),
    "h2o": Decode("H2O, 10 %", dict(method="H2O", budget=0.1), (dict(method="H2O", budget=0.2),)),
    "snapkv": Decode("SnapKV, 10 %", dict(method="SnapKV", budget=0.1),
                     (dict(method="SnapKV", budget=0.2),)),
    "then": Decode("Quest, 20 %, then SANTA, 64 draws", dict(
        method="Then", keys=_QUEST | dict(budget=0.2), values=dict(method="Santa", samples=64, scheme="systematic"))),
    "uniform": Decode("uniform sample, 10 %", dict(method="Uniform", samples=0.1)),
    "topk": Decode("top-k (oracle), 10 %", dict(method="TopK", budget=0.1)),
    "topp": Decode("top-p (oracle), 90 % of the mass", dict(method="TopP", mass=0.9)),
}
_DELTA = dict(method="Delta", window=2048, gamma=64, correction="tangent", tail=128, base=None)
PROMPT = {
    "delta": Prompt("Delta, window 2,048", _DELTA, (_DELTA | dict(window=128, gamma=16), _DELTA | dict(
        window=32, gamma=16, tail=0)), "tangent", ("tangent",)),
    "sketch_walk": Prompt("Sketch&Walk, 20 % of blocks", _WALK | dict(density=0.2, pool="max", refine=2, tail=128), (
        _WALK | dict(density=0.2, pool="max", refine=1, tail=0), _WALK | dict(
            density=0.2, pool="mean", refine=1, tail=0)), "sketch_walk_10", ("Sketch&Walk 20%, refined",
        "Sketch&Walk 10%"), dict(method="SketchWalk", density=0.1, pool="mean", refine=1, tail=0)),
    "streaming": Prompt("window of 2,048", dict(method="Streaming", sinks=4, window=2048), (), "streaming",
                        ("streaming",)),
    "vertical_slash": Prompt("vertical-slash, 500 and 1,500", dict(method="VerticalSlash", vertical=500, slash=1500),
                             first=("vertical-slash",)),
    "flex_prefill": Prompt("FlexPrefill, 95 % of the mass", dict(method="FlexPrefill", gamma=0.95, min_keys=1024),
                           (dict(method="FlexPrefill", gamma=0.9, min_keys=64),), first=("FlexPrefill",)),
    "xattention": Prompt("XAttention, 20 %", dict(method="XAttention", density=0.2, stride=16)),
    "hip": Prompt("HiP", dict(method="HiP", sinks=1024, window=1024), (dict(method="HiP", sinks=128, window=256),)),
    "oracle_blocks": Prompt("oracle blocks, 10 %", dict(method="OracleBlocks", density=0.1)),
    "random_blocks": Prompt("random blocks, 10 %", dict(method="RandomBlocks", density=0.1)),
}
# a method without a line stands in the table as it is by default
DECODE |= {name: Decode(row.label, dict(method=row.path.split(":")[1])) for name, row in METHODS.items()
           if name not in DECODE | PROMPT}
