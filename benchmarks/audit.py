"""What an audit costs beside the step that it audits, by the reference on a GPU"""

import torch

from sparse_nb.audit import audit as audited, key_boxes
from sparse_nb.bench import SHAPES, Case, Protocol, Refused, Shape
from sparse_nb.core.methods import TopK
from sparse_nb.core.selection import weighted_attention
from sparse_nb.metrics import relative_error
from benchmarks.recorder import Recorder, measure_dense


LENGTHS = 8192, 32768, 131072
SAMPLES, DELTA, DENSITY = 256, 0.05, 0.1
INDEXES = {"codes of 4 bits": dict(bits=4, page=64), "boxes of 16 keys": dict(bits=0, page=16)}
EAGER = Protocol(warmup=2, runs=9)

def measure_audits(recorder: Recorder, case: Case):
    "Rows of audits with each index, of a uniform sample, and of making an index."
    q, k, v = case.q, case.k, case.v
    read = TopK(DENSITY).select(q, k)
    out = weighted_attention(q, k, v, read)
    wrong, seen = relative_error(out, case.truth[0]), torch.ones(1, case.n, dtype=torch.bool, device=q.device)
    plain = EAGER if q.is_cuda else recorder.protocol
    def check(bound):
        below = float((bound < wrong).double().mean())
        if below > DELTA: raise Refused(f"{below:.1%} of the bounds are below the error")
        return below
    for name, index in INDEXES.items():
        call = lambda: audited(out, q, k, v, read, samples=SAMPLES, delta=DELTA, seed=1, **index).bound
        recorder.measure_row(call, check, plain=plain, what="audit", index=name, n=case.n)
        recorder.measure_row(lambda: key_boxes(k, seen, **index)[1], None, plain=plain, what="index", index=name,
                             n=case.n)
    call = lambda: audited(out, q, k, v, read, samples=SAMPLES, delta=DELTA, seed=1, bound="clt").bound
    recorder.measure_row(call, None, plain=plain, what="audit", index="none: not proven", n=case.n)

@torch.no_grad()
def audit(recorder):
    "Time audits."
    gpu, quick = recorder.gpu, recorder.quick
    for n in LENGTHS if not quick else (8192,) if gpu else (400,):
        case = Case(SHAPES["llama3"] if gpu else Shape(2, 1, 16), n, device=recorder.device)
        measure_dense(recorder, case, kernels=("sdpa_cudnn", "sdpa_flash"))
        measure_audits(recorder, case)
        if gpu: torch.cuda.empty_cache()
    return dict(samples=SAMPLES, delta=DELTA, density=DENSITY)
