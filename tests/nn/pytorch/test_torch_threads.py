"""Threads that meet in an optimizer, and PyTorch's number of threads as a limit of steps."""

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


# Threads that meet in one optimizer. What they write at once may be lost, as in PyTorch; what one
# thread does afterwards is what PyTorch's class does with the same states.
MEETING = """
    import copy, random, sys
    from functools import partial
    import torch
    from fusestep.nn import torch as ours
    from helpers import at_once

    sys.setswitchinterval(1e-5)
    seed, n_threads, n_actions = (int(x) for x in sys.argv[1:])
    draw = random.Random(seed)
    SHAPES = [(3,), (5, 4), (300, 70), (1,), (17, 9), (40_000,)]
    KINDS = [("Adam", {}), ("AdamW", {"amsgrad": True}), ("SGD", {"momentum": 0.9}), ("SGD", {}),
             ("NAdam", {}), ("RMSprop", {"centered": True}), ("Adadelta", {}), ("Adafactor", {})]

    def strided(shape):
        return torch.randn(*shape, 2)[..., 0]

    def gradient_of(p, r):
        made = torch.randn(p.shape) if r.random() < 0.8 else strided(p.shape)
        return made.to_sparse(1) if r.random() < 0.1 and p.dim() > 1 and can_be_sparse else made

    def exchange(r):
        state = optimizer.state.get(r.choice(parameters)) or {}
        for name in [*state]:
            if isinstance(state.get(name), torch.Tensor):
                state[name] = state[name].clone()

    # PyTorch itself reads a gradient that another thread has just let go of.
    kept = []

    def give(r):
        for p in r.sample(parameters, 3):
            kept.append(gradient_of(p, r))
            p.grad = kept[-1]

    ACTIONS = {
        "step": lambda _: optimizer.step(),
        "step of one": lambda r: optimizer.step(param=r.choice(parameters)),
        "give": give,
        "drop": lambda r: optimizer.state.pop(r.choice(parameters), None),
        "drop all": lambda _: optimizer.state.clear(),
        "exchange": exchange,
        "take": lambda r: setattr(r.choice(parameters), "grad", None),
        "zero": lambda _: optimizer.zero_grad(),
        "clip": lambda _: ours.clip_grad_norm_(parameters, 1.0),
        "clip in step": lambda _: ours.clip_grad_norm_(parameters, 1.0, optimizer=optimizer),
        "clip values": lambda _: ours.clip_grad_value_(parameters, 0.5),
        "copy": lambda _: copy.deepcopy(optimizer),
        "load": lambda _: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        "option": lambda r: optimizer.param_groups[0].update(maximize=r.random() < 0.1),
    }
    USUAL = {"step": 6, "step of one": 3, "give": 5}
    DRAWN = [name for name in ACTIONS for _ in range(USUAL.get(name, 1))]
    done, raised = [0], {}

    def work(r):
        for _ in range(n_actions):
            name = r.choice(DRAWN)
            try:
                ACTIONS[name](r)
            except (RuntimeError, KeyError, ValueError, IndexError) as error:
                text = f"{name}: {type(error).__name__} {str(error)[:60]}"
                raised[text] = raised.get(text, 0) + 1
            done[0] += 1

    def alone(package, parameters, optimizer):
        for p in parameters:
            kept.append(torch.full(p.shape, 0.25))
            p.grad = kept[-1]
        counts = [float(optimizer.state[p].get("step", 0)) for p in parameters]
        for _ in range(3):
            optimizer.step()
        for p, count in zip(parameters, counts, strict=True):
            if "step" in optimizer.state[p]:
                assert float(optimizer.state[p]["step"]) == count + 3

    for trial in range(len(KINDS)):
        name, options = KINDS[(trial + seed) % len(KINDS)]
        can_be_sparse = name != "Adafactor"
        if can_be_sparse:
            options = {**options, "sparse": "all"}
        parameters = [torch.nn.Parameter(torch.randn(s) if draw.random() < 0.7 else strided(s))
                      for s in SHAPES]
        optimizer = getattr(ours, name)(parameters, lr=1e-3, **options)
        for p in parameters:
            kept.append(torch.randn(p.shape))
            p.grad = kept[-1]
        at_once([partial(work, random.Random(draw.random())) for _ in range(n_threads)])
        optimizer.zero_grad()
        twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        plain = {k: x for k, x in options.items() if k != "sparse"}
        other = getattr(torch.optim, name)(twins, lr=1e-3, **plain)
        saved = copy.deepcopy(optimizer.state_dict())
        other.load_state_dict(saved)
        alone(ours, parameters, optimizer)
        alone(torch.optim, twins, other)
        for p, twin in zip(parameters, twins, strict=True):
            torch.testing.assert_close(p, twin, rtol=1e-4, atol=1e-5, equal_nan=True)
    print(done[0], raised, file=sys.stderr)
    print("done", done[0])
"""


@pytest.mark.parametrize("n_threads", [2, 4])
def test_threads_that_meet_in_an_optimizer(n_threads: int) -> None:
    n_actions = 1_250 // n_threads  # of each thread, with each of eight optimizers
    found = output_of(MEETING, str(n_threads), str(n_threads), str(n_actions))
    assert found == f"done {8 * n_threads * n_actions}\n"


SMALL_STEPS = """
    import sys
    import torch
    from fusestep.nn import torch as ours
    from helpers import at_once

    sys.setswitchinterval(1e-6)

    for trial in range(200):  # two first steps
        p = torch.nn.Parameter(torch.zeros(64))
        p.grad = torch.ones(64)
        optimizer = ours.Adam([p], lr=0.1)
        at_once([optimizer.step] * 2)
        for _ in range(3):
            before = optimizer.state[p]["step"].item()
            optimizer.step()
            assert optimizer.state[p]["step"].item() == before + 1

    def work(optimizer, p):
        for k in range(300):
            p.grad = torch.full_like(p, 1.0 + k % 3)
            optimizer.step(param=p)

    parameters = [torch.nn.Parameter(torch.zeros(50 + k)) for k in range(4)]
    optimizer, twin = ours.Adam(parameters, lr=1e-3), torch.nn.Parameter(torch.zeros(1))
    at_once([lambda p=p: work(optimizer, p) for p in parameters])
    work(ours.Adam([twin], lr=1e-3), twin)
    for p in parameters:
        assert (p == twin).all() and optimizer.state[p]["step"] == 300
    print("done")
"""


def test_first_steps_at_once_and_steps_on_parameters_of_their_own() -> None:
    """Of the latter no update is lost, and all bits are those of one thread."""
    assert output_of(SMALL_STEPS) == "done\n"
