"""Two processes that share the heads of a model write what one process writes: tensor parallelism over gloo on the CPU,
and over NCCL on two GPUs"""
import json
import os
import socket
import sys
from functools import partial

import pytest
import torch

transformers = pytest.importorskip("transformers")

from sparse_nb import pocket
from sparse_nb.attention import TopK, Uniform, assert_close
from sparse_nb.hash_attention import HashAttention
from sparse_nb.hf import sparsify
from benchmarks import generate
from sparse_nb.saap import Saap
from sparse_nb.santa import Santa
from sparse_nb.vattention import VAttention

SMALL = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2,
             max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.2)
RANDOM = {"llama": "Llama", "gpt-neox, fused": "GPTNeoX", "phi3, all heads everywhere": "Phi3"}
# of keys: in one process, in each of two
HEADS = {"llama": (2, 1), "gpt-neox, fused": (4, 2), "phi3, all heads everywhere": (2, 2), "pocket": (2, 1)}
METHODS = {"own": None, "topk": TopK(budget=0.25), "uniform": Uniform(samples=0.5), "santa": Santa(samples=64),
           # keys of a token that comes twice are equal before RoPE, and its clusters a matter of rounding
           "saap": Saap(0.25, clusters=6, window=8, before_rope=False),
           "hash": HashAttention(0.25, maps="random"),
           "vattention": VAttention(eps=0.9, delta=0.5, sinks=1, window=1, topk=0.05, base=4, plugin="plain",
                                    predictor=HashAttention(0.1, maps="random"))}
STEPS = 8
BENCH = dict(lengths=((70, 1),), static=True, tokens=3, shape=generate.TINY | dict(initializer_range=0.2),
             methods={"santa": Santa(samples=16), "broken": HashAttention(0.25, maps="nowhere"), "uneven": Uniform(16),
                      "hashed": HashAttention(0.25, maps="random")})

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs gloo on Linux")

def load(folder, device):
    """The model in float64, so that sums in another order choose the same keys, on GPUs in float32, which has kernels;
    under torchrun this process's share of it"""
    model_of, settings = transformers.AutoModelForCausalLM.from_pretrained, dict(dtype=torch.float64 if device == "cpu"
        else torch.float32)
    if not torch.distributed.is_torchelastic_launched(): return model_of(folder, **settings).eval().to(device)
    from transformers.distributed import DistributedConfig
    return model_of(folder, distributed_config=DistributedConfig(tp_plan="auto"), **settings).eval()

def write(folder, name, device):
    "What the model writes with each method: tokens, logits, key heads in this process"
    model, found = load(folder / name if name in RANDOM else pocket.path(), device), {}
    if name == "pocket":
        ids = torch.tensor([[pocket.BOS,
                             *b"The key of the red door is 4071. The key of the blue door is 2296.\nThe key of the red "
                              b"door is"]])
    else: ids = torch.randint(3, 64, (1, 60), generator=torch.Generator().manual_seed(1))
    ids = ids.to(model.device)
    assert model.device.type == device
    maps = "pocket" if name == "pocket" else str(folder / f"{name}.safetensors")  # of all heads
    for method in METHODS:
        decode = METHODS[method] and generate.with_networks(METHODS[method], maps)
        with sparsify(model, decode=decode, seed=0):
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, do_sample=False,
                                 return_dict_in_generate=True, output_logits=True)
        found[method] = dict(ids=out.sequences.cpu(), logits=torch.cat(out.logits).cpu(),
                             heads=out.past_key_values.layers[0].keys.shape[1])
    with sparsify(model, decode=HashAttention(0.25, maps=str(folder / "twice.safetensors")), seed=0):
        with pytest.raises(ValueError, match="maps must hold networks that fit"): model.generate(ids, max_new_tokens=2)
    return found

def bench(folder, device):
    "What `bench_generate` says and writes, and the tokens of each way; the model as in `load`; the second fails once"
    said, wrote, row_of, number = [], {}, generate._row, os.environ.get("RANK", "one")
    path, dtype = folder / f"{number}.json", torch.float64 if device == "cpu" else torch.float32
    def watched(model, filled, name, way, runs, tokens, found, *settings):
        row = row_of(model, filled, name, way, runs, tokens, found, *settings)
        wrote[name, filled.n] = found[name].cpu()
        if (name, number) == ("uneven", "1"): raise RuntimeError("only here")
        return row
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "random_model", partial(generate.random_model, dtype=dtype))
        patch.setattr(generate, "_row", watched)
        generate.bench_generate(**BENCH, device=device, out=path, say=said.append)
    return dict(record=json.loads(path.read_text()) if path.exists() else None, said=said, wrote=wrote)

def write_together(rank, port, folder, device):
    "A file of what one of two processes writes."
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="none")
    if device == "cpu": os.environ["CUDA_VISIBLE_DEVICES"] = ""
    found = dict(bench=bench(folder, device))  # first, for it joins the processes as it needs them
    found |= {name: write(folder, name, device) for name in HEADS}
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
    return folder / f"{rank}.pt"

TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def ranks(tmp_path_factory, request, started):
    "What one process writes, then each of two, which find each other as torchrun's do"
    device, folder = request.param, tmp_path_factory.mktemp("parallel")
    for name, kind in RANDOM.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(getattr(transformers,
            kind + "Config")(**SMALL)).save_pretrained(folder / name)
        generate.random_networks(SMALL | dict(num_key_value_heads=HEADS[name][0]), folder / f"{name}.safetensors")
    twice = SMALL | dict(num_attention_heads=8, num_key_value_heads=4, hidden_size=128)  # for another model
    generate.random_networks(twice | dict(num_hidden_layers=6), folder / "twice.safetensors")
    with socket.create_server(("127.0.0.1", 0)) as free: port = free.getsockname()[1]
    two = [started(write_together, rank, port, folder, device) for rank in range(2)]
    one = {name: write(folder, name, device) for name in HEADS} | dict(bench=bench(folder, device))
    return [1e-5 if device == "cpu" else 1e-3, one, *(torch.load(rank()) for rank in two)]

@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", HEADS)
def test_two_processes_write_what_one_writes(ranks, name, method):
    rtol, *found = ranks
    one, *two = (rank[name] for rank in found)
    for rank in two:
        assert (one[method]["heads"], rank[method]["heads"]) == HEADS[name]
        assert torch.equal(rank[method]["ids"], one[method]["ids"])
        assert_close(rank[method]["logits"], one[method]["logits"], rtol=rtol)
    if method != "own":
        error = (one[method]["logits"] - one["own"]["logits"])[1].norm() / one["own"]["logits"][1].norm()
        assert error > 1e-3

def test_two_processes_measure_and_the_first_writes(ranks):
    one, first, second = (rank["bench"] for rank in ranks[1:])
    ways = {generate.EXACT, "santa", "uneven", "hashed"}
    assert set(one["wrote"]) == {(generate.NO_KEYS, 16), *((way, 70) for way in (generate.PAIR[0], *ways))}
    for found in first, second:
        assert set(found["wrote"]) == {(generate.NO_KEYS, 16), *((way, 70) for way in ways)}
        for way, ids in found["wrote"].items(): assert torch.equal(ids, one["wrote"][way]), way
    assert len({tuple(one["wrote"][way, 70][0].tolist()) for way in ways}) > 2
    assert second["record"] is None and second["said"] == [] and len(first["said"]) == 7
    alone, shared = one["record"], first["record"]
    assert (shared["meta"]["gpus"], alone["meta"]["gpus"]) == (2, 1)
    for record, names in (alone, ["broken"]), (shared, ["broken", "uneven"]):
        failed = {x["way"]: x["why"] for x in record["meta"]["failed"]}
        assert list(failed) == names and "nowhere" in failed["broken"]
    assert failed["uneven"] == "another process failed"
    assert alone["meta"]["weights_bytes"] / 2 <= shared["meta"]["weights_bytes"] < alone["meta"]["weights_bytes"]
    rows = {row["way"]: row for row in shared["rows"]}
    assert set(rows) == {generate.NO_KEYS, *ways} - {"uneven"}
    for way, row in rows.items():
        assert (row["gpus"], row["static"], row["replay"]) == (2, True, True)
        assert row["median_us"] > 0 < row["kernel_us"]
        assert row["rival"] == (None if way == generate.NO_KEYS else generate.EXACT), way
    assert all(row["gpus"] == 1 for row in alone["rows"])

def test_rows_of_one_and_of_two_gpus_are_kept_apart():
    row = dict(way=generate.EXACT, n=9, batch=1, static=True, median_us=9.0)
    about = dict(gpu="one", shape={}, failed=[])
    records = [dict(meta=about | dict(date=date), rows=[row | more]) for date, more in
               (("1", {}), ("2", dict(gpus=2, median_us=4.0)), ("3", dict(gpus=1, median_us=8.0)))]
    joined = generate.join_records(records)
    assert [(x.get("gpus", 1), x["median_us"]) for x in joined["rows"]] == [(2, 4.0), (1, 8.0)]
    assert [x["median_us"] for x in joined["meta"]["replaced"]] == [9.0]
    own = [row | dict(way="x", gpus=gpus, median_us=2.0) for gpus in (1, 2)]
    assert [x["ratio"] for x in generate.add_baselines([*joined["rows"], *own])[2:]] == [4.0, 2.0]

@pytest.mark.parametrize("what", generate.SHARED)
def test_a_shape_that_two_processes_cannot_share(what, monkeypatch, tmp_path):
    for name, x in dict(TORCHELASTIC_RUN_ID="x", RANK=0, WORLD_SIZE=2, LOCAL_RANK=0).items():
        monkeypatch.setenv(name, str(x))
    with pytest.raises(ValueError, match=f"shape must have a {what} that 2 processes can share out, got 3"):
        generate.bench_generate(**BENCH | dict(shape=generate.TINY | {what: 3}), device="cpu", out=tmp_path)
    assert not torch.distributed.is_initialized() and not list(tmp_path.iterdir())

@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("method", [TopK(budget=0.25), Uniform(samples=0.5), Santa(samples=64)],
                         ids=lambda m: type(m).__name__)
def test_layers_on_two_gpus_write_what_one_gpu_writes(method, offload):
    ids = torch.tensor([[pocket.BOS,
                         *b"The key of the red door is 4071. The key of the blue door is 2296.\nThe key of the red "
                          b"door is"]], device="cuda")
    def write(**settings):
        model = transformers.AutoModelForCausalLM.from_pretrained(pocket.path(), dtype=torch.float32, **settings).eval()
        with sparsify(model, decode=method, seed=0, offload=offload):
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=STEPS, do_sample=False,
                                 return_dict_in_generate=True, output_logits=True)
        return {p.device for p in model.parameters()}, out.sequences, torch.cat(out.logits)
    devices, one, logits = write(device_map={"": 0})
    # the head shares the weights of the embedding
    places = {f"model.layers.{i}": int(i > 2) for i in range(6)} | {"model.embed_tokens": 0, "model.rotary_emb": 0,
        "model.norm": 1, "lm_head": 0}
    both, two, others = write(device_map=places)
    assert (len(devices), len(both)) == (1, 2) and torch.equal(one, two) and torch.equal(logits, others.to(logits))
    assert torch.equal(write(device_map="auto")[1].to(one), one)
