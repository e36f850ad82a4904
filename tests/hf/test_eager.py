"What an eager step costs in a session: operations and launches of a layer, the same on every machine"
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")
from transformers import DynamicCache
from triton.runtime.jit import JITFunction

import sparse_nb.core.selection
import sparse_nb.kernels.exact
import sparse_nb.kernels.gather
import sparse_nb.kernels.santa
import sparse_nb.kernels.top_budget
import sparse_nb.methods.santa
from sparse_nb.attention import Exact, Streaming, TopK
from sparse_nb.methods.quest import Quest
from sparse_nb.hf import sparsify
from sparse_nb.santa import Santa
from sparse_nb.vattention import VAttention
from inputs import IDS
from models import OLD, SMALL

class Operations(TorchDispatchMode):
    "Counts what torch is asked to do."
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))

def in_a_step(layers, session, launched):
    "Operations and launches of the fifth token of a Llama of so many layers"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | dict(num_hidden_layers=layers))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache, token = DynamicCache(config=config), IDS[:, -1:]
    undo = None if session is None else sparsify(model, **session)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        for _ in range(3): model(token, past_key_values=cache)
        launched.clear()
        with Operations() as counted: model(token, past_key_values=cache)
    if undo is not None: undo.restore()
    return counted.count, len(launched)

def a_layer(session, launched):
    "Operations and launches of one more layer"
    few, many = (in_a_step(layers, session, launched) for layers in (2, 5))
    return [(y - x) / 3 for x, y in zip(few, many)]

def operations_added(session): return a_layer(session, [])[0] - a_layer(None, [])[0]

@pytest.mark.parametrize("method, most", [
    (None, 0), (Exact(), 0), (Streaming(sinks=2, window=0.2), 57), (TopK(budget=0.2), 82), (Santa(samples=4), 470),
    (Quest(budget=0.2, page=4), 224), (VAttention(sinks=2, window=2, topk=4, base=4), 2022)],
    ids=lambda x: type(x).__name__)
def test_operations_that_a_method_adds_to_a_layer(method, most):
    "The PyTorch references with their looks at values: at most so many operations more than the model's own attention."
    assert operations_added(dict(decode=method)) <= most

@pytest.fixture
def launched(monkeypatch):
    "The launches of kernels, which do nothing, as if queries were on a GPU"
    names = []
    def launch(made, name, kernel, grid, *args, **options):
        names.append(name)
        out = dict(merge=3, gather=None, read=None, scores=None, draws=12)[name]
        if out is not None: args[out].numpy().fill(0)
    def run(kernel, *args, grid, **options):
        names.append(kernel.__name__)
        if kernel.__name__ == "_list_kernel":  # numbers, weights and how many
            for x, value in zip(args[3:6], (0, 1, args[4].shape[3])): x.numpy().fill(value)
    monkeypatch.setattr(JITFunction, "run", run)
    for module in (sparse_nb.core.selection, sparse_nb.methods.santa):
        monkeypatch.setattr(module, "has_kernels", lambda q: q.shape[2] == 1)
    for module in (sparse_nb.kernels.exact, sparse_nb.kernels.gather, sparse_nb.kernels.santa):
        monkeypatch.setattr(module, "relaunch", launch)
        monkeypatch.setattr(module, "refusal", lambda q: None)
    monkeypatch.setattr(sparse_nb.kernels.top_budget, "refusal", lambda q: None)
    return names

@pytest.mark.parametrize("method, own, most", [(Streaming(sinks=2, window=0.2), 2, 8), (TopK(budget=0.2), 7, 33),
                                               (Santa(samples=4), 2, 9)], ids=lambda x: type(x).__name__)
def test_what_a_layer_adds_beside_its_kernels(launched, method, own, most):
    "The way of a GPU: its launches, and at most so many operations more, workspaces and views included."
    operations, launches = a_layer(dict(decode=method), launched)
    own_way = a_layer(None, launched)[0] + OLD  # transformers does one less there
    assert launches == own and operations - own_way <= most


def test_a_step_checks_once_what_is_not_looked_at(monkeypatch):
    from sparse_nb.core import checks
    asked, check = [], checks._check_inputs
    monkeypatch.setattr(checks, "_check_inputs", lambda *given: asked.append(given) or check(*given))
    q, k = (torch.empty(1, heads, n, 8, device="meta") for heads, n in ((4, 1), (2, 9)))
    with checks.Step():
        for _ in range(3): checks.check_inputs(q, k, k, scale=0.5)
        assert len(asked) == 1
        for _ in range(2):
            with pytest.raises(ValueError, match="scale must be positive and finite, got 0"):
                checks.check_inputs(q, k, k, scale=0)
            with pytest.raises(TypeError, match="scale must be a number, got bool"):
                checks.check_inputs(q, k, k, scale=True)
        for x in (torch.ones(1, 4, 1, 8), torch.ones(1, 4, 1, 8)): checks.check_inputs(x, x)
    assert len(asked) == 7
    checks.check_inputs(q, k, k, scale=0.5)
    assert len(asked) == 8  # outside of a step always
