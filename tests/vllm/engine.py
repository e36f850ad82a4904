"""vLLM in processes of their own, imported once: each line of standard input is a job in JSON, for which this process
forks; the answer goes to a file in JSON, and its name, or the end of what went wrong, to standard output.

{"to": file, "engine": arguments of `LLM`, "rounds": [{"prompts": .., "new": tokens to write, "settings":
other ones, "cancel": number of a prompt whose request is dropped on the way}]} gives for each round tokens, cached
(those of each prompt that were in the cache) and stats; preemptions counts all rounds, and attention names the classes
that attend. {"to": file, "configs": [arguments]} gives what each is refused with, or null.
"""
import json
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path


def use(llm, settings):
    "Other settings in an engine of this process; the room of blocks stays as it is."
    from sparse_nb.vllm.serving import read_serving
    for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
        layer.impl.serving, layer.impl.number = read_serving(settings, 6), None


def generated(llm, prompts, new, cancel=None):
    "What came of requests that were sent at once, of which one may be dropped when it has written a token."
    from vllm import SamplingParams
    how = SamplingParams(temperature=0, max_tokens=new, detokenize=False, ignore_eos=True)
    engine, found = llm.llm_engine, {}
    for i, x in enumerate(prompts): engine.add_request(str(i), dict(prompt_token_ids=x), how)
    while engine.has_unfinished_requests():
        for x in engine.step():
            if x.finished: found[x.request_id] = x
            elif x.request_id == str(cancel): engine.abort_request([x.request_id])
    found = [found.get(str(i)) for i in range(len(prompts))]
    tokens = [x and list(x.outputs[0].token_ids) for x in found]
    return dict(tokens=tokens, cached=[x and x.num_cached_tokens for x in found])


def answers(engine, rounds):
    from vllm import LLM
    from sparse_nb.vllm.serving import stats
    llm, found = LLM(**engine), []
    for work in rounds:
        if "settings" in work: use(llm, work.pop("settings"))
        row = generated(llm, **work)
        if "additional_config" in engine: row["stats"] = stats(llm).reset_index().to_dict("list")
        found.append(row)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()  # of this process
    preempted = sum(x.value for x in llm.get_metrics() if x.name == "vllm:num_preemptions")
    return dict(rounds=found, preemptions=preempted, attention=sorted({type(x.impl).__name__ for x in layers}))


def refused(arguments):
    from vllm.engine.arg_utils import EngineArgs
    try: EngineArgs(**arguments).create_engine_config()
    except (TypeError, ValueError) as error: return str(error)


def work(to, **job):
    found = [refused(x) for x in job["configs"]] if "configs" in job else answers(**job)
    Path(to).write_text(json.dumps(found))


if __name__ == "__main__":
    import torch  # noqa: F401
    import vllm.entrypoints.llm  # noqa: F401
    for line in sys.stdin:
        if os.fork(): continue
        job, said = json.loads(line), ""
        try: work(**job)
        except BaseException: said = traceback.format_exc()[-4000:]
        print(json.dumps([job["to"], said]), flush=True)
        os._exit(bool(said))
    with suppress(ChildProcessError):  # so that their time is counted
        while True: os.wait()
