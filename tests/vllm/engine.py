"""vLLM in a process of its own: work as JSON on standard input, what came of it as JSON in a file.

{"engine": arguments of `LLM`, "rounds": [{"prompts": .., "new": tokens to write, "settings": other ones}]} gives for
each round tokens, cached (those of each prompt that were in the cache) and stats; preemptions counts all rounds, and
attention names the classes that attend. {"configs": [arguments]} gives what each is refused with, or null.
"""
import json
import sys
from pathlib import Path


def use(llm, settings):
    "Other settings in an engine of this process; the room for boxes stays as it is."
    from sparse_nb.vllm.serving import read_serving
    for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
        layer.impl.serving, layer.impl.number = read_serving(settings, 6), None


def answers(engine, rounds):
    from vllm import LLM, SamplingParams
    from sparse_nb.vllm.serving import stats
    llm, found = LLM(**engine), []
    for work in rounds:
        if "settings" in work: use(llm, work["settings"])
        how = SamplingParams(temperature=0, max_tokens=work["new"], detokenize=False, ignore_eos=True)
        said = llm.generate([dict(prompt_token_ids=x) for x in work["prompts"]], how, use_tqdm=False)
        row = dict(tokens=[list(x.outputs[0].token_ids) for x in said], cached=[x.num_cached_tokens for x in said])
        if "additional_config" in engine: row["stats"] = stats(llm).reset_index().to_dict("list")
        found.append(row)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()  # of this process
    preempted = sum(x.value for x in llm.get_metrics() if x.name == "vllm:num_preemptions")
    return dict(rounds=found, preemptions=preempted, attention=sorted({type(x.impl).__name__ for x in layers}))


def refused(arguments):
    from vllm.engine.arg_utils import EngineArgs
    try: EngineArgs(**arguments).create_engine_config()
    except (TypeError, ValueError) as error: return str(error)


if __name__ == "__main__":
    job = json.load(sys.stdin)
    found = [refused(x) for x in job["configs"]] if "configs" in job else answers(**job)
    Path(sys.argv[1]).write_text(json.dumps(found))
