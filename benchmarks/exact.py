"""The exact kernels with the tiles that ship and with others, beside the dense kernels of the same run"""

import torch

from sparse_nb.bench import SHAPES, Case, Shape, check_dense
from sparse_nb.kernels.common import by_engine
from sparse_nb.kernels.exact import Tiles, launch, tile_settings
from benchmarks.recorder import Recorder, measure_dense


LENGTHS = 2048, 8192, 32768, 131072, 524288, 1048576
TRIED = Tiles(64, 4, 4, 2, 8), Tiles(64, 4, 3, 3, 8, 168), Tiles(64, 4, 3, 2, 0)  # beside those that ship

def measure_tiles(recorder: Recorder, case: Case, tiles: Tiles | None = None):
    "A row: the kernels with these tiles."
    q, k, v, shipped = case.q, case.k, case.v, tiles is None
    used = tile_settings(case.shape.D, q.element_size(), by_engine(q, k, v)) if shipped else tiles
    recorder.measure_row(lambda: launch(q, k, v, None, None, None, used), lambda out: check_dense(out, case),
                         method="exact", n=case.n, tiles=used, shipped=shipped, nbytes=2 * k.nbytes)

@torch.no_grad()
def exact(recorder):
    "Time exact attention."
    gpu, quick = recorder.gpu, recorder.quick
    for n in LENGTHS if not quick else (8192,) if gpu else (200,):
        case = Case(SHAPES["llama3"] if gpu else Shape(2, 1, 16), n, device=recorder.device)
        measure_dense(recorder, case, kernels=("sdpa_cudnn", "sdpa_flash"))
        for tiles in (None, *(TRIED[:1] if quick else TRIED)): measure_tiles(recorder, case, tiles)
        if gpu: torch.cuda.empty_cache()
    return {}
