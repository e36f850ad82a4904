"""Milliseconds of a decoding step inside vLLM, as `tests/gpu/vllm_day.py` has recorded them"""
import json
from pathlib import Path

FILE = Path(__file__).parent / "results" / "nvidia_h200_vllm.json"
OWN = "vLLM's own" # the method of rows where vLLM's attention decodes


def steps(
    part: str = "speed", # "speed": one GPU; "two_speed": two GPUs that share the heads; "qwen_speed": a smaller model
) -> dict:               # (method, case) -> ms; a case is keys x sequences
    "What a step took with each method."
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    return {(row["method"], row["case"]): row["ms_a_step"] for row in rows
            if (row["part"], row["what"]) == (part, "speed")}

def speedup(
    method: str, # as it stands in the rows
    case: str,   # likewise
    part: str = "speed",
) -> float:
    "Of a step over vLLM's own attention in the same run."
    found = steps(part)
    return found[OWN, case] / found[method, case]
