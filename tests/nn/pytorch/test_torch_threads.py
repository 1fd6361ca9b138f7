"""A lowered number of threads of PyTorch limits steps in its form, and no others."""

from __future__ import annotations

import pytest

from subprocesses import output_of

pytest.importorskip("torch")

PROGRAM = """
    import numpy as np
    import torch
    torch.set_num_threads(3)
    from fusestep import get_num_threads, nn
    from fusestep.kernels.cpu.threads import parallel
    from fusestep.nn import distributed, torch as ours

    N = 200_000
    parallel.compile_loops()
    asked, loops = [], parallel._parallel_loops
    call = loops.call
    loops.call = lambda at, n, threads, *rest: asked.append(threads) or call(at, n, threads, *rest)

    def dense(make, shape=(N,), **options):
        w = torch.nn.Parameter(torch.ones(shape))
        opt = make([w], **options)

        def step():
            w.grad = torch.full(shape, 0.5)
            opt.step()
        return step

    def rows(make, **options):
        table = torch.nn.Embedding(2_000, 100, sparse=True)
        opt = make(table.parameters(), **options)

        def step():
            opt.zero_grad()
            table(torch.arange(70_000) % 2_000).sum().backward()
            opt.step()
        return step

    def bags(backward):
        tables = ours.EmbeddingBags([(2_000, 100)])
        tables.update_in_backward(ours.SGD(tables.parameters(), lr=0.1))
        ids = torch.arange(70_000).reshape(-1, 10) % 2_000

        def step():
            out = tables([ids])
            if backward:
                asked.clear()
                out.sum().backward()
        return step

    def clipped():
        w = torch.nn.Parameter(torch.ones(N))
        w.grad = torch.ones(N)
        return lambda: ours.clip_grad_norm_([w], 1.0)

    def sharded():
        table = ours.ShardedEmbedding(2_000, 100, distributed.alone())
        return lambda: table(torch.arange(70_000) % 2_000)

    def thor():
        layer = torch.nn.Linear(2_100, 2_100)
        opt = ours.Thor(layer, lr=0.1, damping=0.1, batch_size=4, block_size=64)

        def step():
            opt.zero_grad()
            layer(torch.ones(4, 2_100)).sum().backward()
            opt.step()
        return step

    def of_numpy():
        opt = nn.Adam([np.ones(N, np.float32)])
        return lambda: opt((np.ones(N, np.float32),))

    cases = {
        "Adam": dense(ours.Adam),
        "skip_nonfinite": dense(ours.Adam, skip_nonfinite=True),
        "Lamb": dense(ours.Lamb),
        "Adafactor": dense(ours.Adafactor, (400, 500)),
        "LazyAdam": rows(ours.LazyAdam),
        "all rows": rows(ours.Adam, sparse="all"),
        "EmbeddingBags": bags(False),
        "EmbeddingBags, backward": bags(True),
        "clip_grad_norm_": clipped(),
        "ShardedEmbedding": sharded(),
        "Thor": thor(),
        "nn.Adam": of_numpy(),
    }
    for wanted in (3, 2, 1, 5):
        torch.set_num_threads(wanted)
        for name, step in cases.items():
            asked.clear()
            step()
            expected = 4 if name == "nn.Adam" or wanted >= 3 else wanted
            assert max(asked, default=1) == expected, (name, wanted, asked)
        assert get_num_threads() == 4 and torch.get_num_threads() == wanted
    print("done")
"""


def test_threads_of_torch_are_a_limit_where_they_were_lowered() -> None:
    # The program counts the threads of Numba's layer.
    alone = {"FUSESTEP_SHARE_OPENMP": "0"}
    assert output_of(PROGRAM, NUMBA_NUM_THREADS="4", **alone) == "done\n"
