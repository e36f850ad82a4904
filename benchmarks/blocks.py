"""Prompts through lists of blocks and through a window, beside the dense kernels of PyTorch, on one GPU"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparse_nb.bench import SHAPES, Protocol, Shape
from benchmarks.timing import close_to
from sparse_nb.core.blocks import BlockPattern, sinks_window_pattern
from sparse_nb.kernels.blocks import launch_blocks, launch_streaming, tile_settings


def _checker(q, k, v, seen):
    "A check of an output: some of its rows against float64, over the keys that `seen(head, rows)` says they see"
    n, heads = q.shape[2], (0, q.shape[1] - 1)
    rows = torch.randint(n, (48,), generator=torch.Generator().manual_seed(1))
    rows = torch.cat([torch.arange(min(16, n)), rows]).to(q.device)
    R, want = q.shape[1] // k.shape[1], []
    for h in heads:
        scores = q[0, h, rows].double() @ k[0, h // R].double().mT * q.shape[3]**-0.5
        want.append(scores.masked_fill(~seen(h, rows), -torch.inf).softmax(-1) @ v[0, h // R].double())
    close = close_to(torch.stack(want))
    return lambda out: close(torch.stack([out[0, h, rows] for h in heads]))


STREAMING = (((128, 64, 4, 2, None), False), ((128, 64, 4, 2, None), True), ((128, 128, 8, 2, None), True),
             ((128, 64, 8, 2, 128), True), ((64, 64, 4, 3, None), False), ((64, 64, 4, 3, None), True))
LISTS = (((64, 64, 4, 3, None), True), ((128, 128, 8, 3, None), True), ((128, 64, 4, 3, None), True),
         ((128, 64, 8, 3, 128), True))
LENGTHS, SINKS, WINDOW, DENSITY = (32768, 131072), 4, 2048, 0.1  # positions; of the window; of lists drawn at random

class _Prompt:
    "Queries, keys and values of one length, and how its rows are made."
    def __init__(self, recorder, n, shape, window):
        self.recorder, self.n, self.shape, self.window = recorder, n, shape, window
        self.generator = torch.Generator(recorder.device).manual_seed(0)
        new = lambda heads: self.rand(torch.randn, 1, heads, n, shape.D).bfloat16()
        self.q, self.k, self.v = new(shape.H), new(shape.G), new(shape.G)
        self.i, self.each = torch.arange(n, device=recorder.device), 4 * shape.H * shape.D / 1e12

    def rand(self, draw, *size): return draw(*size, device=self.recorder.device, generator=self.generator)

    def note(self, call, seen, pairs, **row):
        "Check and time a call, whose queries see `pairs` keys in all."
        check = _checker(self.q, self.k, self.v, seen)
        self.recorder.measure_row(call, check, tflop=round(self.each * pairs, 4), n=self.n, **row)


def _dense(p):
    "PyTorch's dense kernels."
    for name, backend in (("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION), ("sdpa_flash", SDPBackend.FLASH_ATTENTION)):
        def dense():
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(p.q, p.k, p.v, is_causal=True, enable_gqa=True)
        try: p.note(dense, lambda h, rows: p.i <= rows[:, None], p.n * (p.n + 1) / 2, method=name)
        except RuntimeError as error: p.recorder.say(f"{name}: {str(error)[:100]}")

def _streaming(p, settings):
    "A window and sinks, by loop bounds."
    seen = lambda h, rows: (p.i <= rows[:, None]) & ((p.i > rows[:, None] - p.window) | (p.i < SINKS))
    pairs = int((p.i + 1).clamp(max=SINKS + p.window).sum())
    for tiles, engine in settings:
        call = lambda: launch_streaming(p.q, p.k, p.v, SINKS, p.window, None, None, None, False, tiles, engine)[0]
        p.note(call, seen, pairs, method="streaming", tiles=tiles, engine=engine,
               shipped=tiles == tile_settings(128, 2, engine, False))
    return seen, pairs

def _lists(p, pattern, seen, pairs, settings, **row):
    "Lists of blocks."
    density = round(float(pattern.density()), 4)
    for tiles, engine in settings:
        call = lambda: launch_blocks(p.q, p.k, p.v, pattern.index, pattern.count, pattern.gap, pattern.query_block,
                                     pattern.key_block, True, None, None, None, False, tiles, engine)[0]
        p.note(call, seen, pairs, tiles=tiles, engine=engine, density=density,
               shipped=tiles == tile_settings(128, 2, engine, True), **row)

def _random_lists(p, block, settings):
    "Lists that are drawn at random, one for each group."
    (H, G, _), M, n = p.shape, -(-p.n // block), p.n
    mask = p.rand(torch.rand, 1, G, M, M) < DENSITY
    mask = (mask | torch.eye(M, dtype=torch.bool, device=p.q.device)).tril()
    pattern = BlockPattern.from_mask(mask, queries=n, keys=n, query_block=block, key_block=block)
    listed = lambda h, rows: mask[0, h // (H // G), rows // block].repeat_interleave(block, -1)[:, :n]
    pairs = ((int(mask.sum()) - G * M) * block**2 + G * M * block * (block + 1) / 2) / G
    _lists(p, pattern, lambda h, rows: listed(h, rows) & (p.i <= rows[:, None]), pairs, settings, method="lists",
           block=block)


@torch.no_grad()
def blocks(recorder):
    "Time prompts by blocks and window, and PyTorch's dense kernels."
    gpu, quick = recorder.gpu, recorder.quick
    if gpu: recorder.protocol = Protocol(warmup=3, runs=15, buffer_mb=recorder.protocol.buffer_mb)
    shape, window = (SHAPES["llama3"], WINDOW) if gpu else (Shape(2, 1, 16), 48)
    streaming, lists = (STREAMING, LISTS) if gpu else ([(None, False)], [(None, False)])
    if gpu:
        a, b = torch.randn(2, 8192, 8192, device=recorder.device).bfloat16()
        recorder.measure_row(lambda: a @ b, tflop=round(2 * len(a)**3 / 1e12, 4), method="matmul", n=len(a))
    for n in (4096 if gpu else 160,) if quick else LENGTHS:
        p = _Prompt(recorder, n, shape, window)
        if gpu: _dense(p)
        seen, pairs = _streaming(p, streaming)
        pattern = sinks_window_pattern(p.q, p.k, sinks=SINKS, window=window)
        _lists(p, pattern, seen, pairs, lists[-1:], method="window_by_lists", block=64)
        for block in (128, 64, 32) if gpu else (32,): _random_lists(p, block, lists if block > 32 else lists[-1:])
    return dict(sinks=SINKS, window=window, density=DENSITY)
