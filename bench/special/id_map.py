"""Rows of ids of 64 bits: `nn.IdMap`, beside what people take for it.

Lookups (``find``), lookups that count (``call``) and first occurrences (``admit``) of a batch of
ids, with so many ids known. Peers: Python's dict, ``np.unique`` and ``pandas.factorize``, which
number the ids of the batch alone, and torchrec's managed collision with as many slots, whose ids
are profiled as in training. Limits are ids a second, and 20 us for a call of few ids. Bags with
maps are beside bags with row numbers, forward and backward with LazyAdam.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from ... import nn
from ...kernels.keeping import mixed
from ..measure import one_by_one, seconds_of
from ..report.result import Progress, SpecialResult, tracked
from ..workers.worker_protocol import Job

KNOWN = {"10^5": 10**5, "10^6": 10**6, "10^7": 10**7, "10^8": 10**8}
BATCHES = {"65,536": 65_536, "10^6": 10**6}
FIND_PER_S, ADMIT_PER_S = {"10^6": 25e6, "10^8": 12e6}, 4e6
FEW, FEW_SECONDS, ROUNDS, PEER_ROUNDS, MCH_MOST = 64, 20e-6, 15, 3, 10**6
TABLES, ROWS, DIM, BAGS, LENGTH = 8, 200_000, 32, 2_048, 4


def ids_of(numbers: np.ndarray) -> np.ndarray:
    """Ids of 64 bits of numbers."""
    found: np.ndarray = mixed(numbers.astype(np.uint64)).view(np.int64)
    return found


def drawn(law: str, known: int, n: int, seed: int) -> np.ndarray:
    """Ids of a batch, all of them known: each alike, or by Zipf's law with exponent 1.05."""
    share = np.random.default_rng(seed).random(n)
    if law == "uniform":
        return ids_of((share * known).astype(np.int64))
    # The inverse of the integral of k**-1.05 from 1 to the number of ids.
    power = 1 - 1.05
    ranks = (1 + share * (float(known) ** power - 1)) ** (1 / power)
    return ids_of(np.minimum(ranks.astype(np.int64), known - 1))


def run(result: SpecialResult, threads: int, progress: Progress) -> None:  # noqa: ARG001
    """Measure all sizes, then bags."""
    for name, known in tracked(list(KNOWN.items()), progress):
        own = nn.IdMap(known + 1)
        parts = np.array_split(ids_of(np.arange(known)), max(1, known // 65_536))
        admitted = [seconds_of(partial(own, part, k)) for k, part in enumerate(parts)]
        label = f"{name} known: admit {len(parts[-1]):,}"
        result.add({label: admitted})
        result.limits[label] = len(parts[-1]) / ADMIT_PER_S
        step = len(parts)
        call, label = partial(own, ids_of(np.arange(FEW)), step), f"{name} known: call of {FEW}"
        result.add({label: [seconds_of(call) for _ in range(50)]})
        result.limits[label] = FEW_SECONDS
        for law in ("uniform", "zipf1.05"):
            for of_batch, n in BATCHES.items():
                batches = [drawn(law, known, n, k) for k in range(ROUNDS)]
                label = f"{name} known, {law} {of_batch}"
                result.add({
                    f"{label}: find": [seconds_of(partial(own.find, ids)) for ids in batches],
                    f"{label}: call": [seconds_of(partial(own, ids, step)) for ids in batches],
                })  # fmt: skip
                if law == "uniform" and name in FIND_PER_S:
                    result.limits[f"{label}: find"] = n / FIND_PER_S[name]
                if of_batch == "65,536" and known <= MCH_MOST:
                    for peer, look in peers(parts).items():
                        times = [seconds_of(partial(look, ids)) for ids in batches[:PEER_ROUNDS]]
                        result.add({f"{label}: {peer}": times})
    _bags(result)


def peers(known: list[np.ndarray]) -> dict[str, Callable[[np.ndarray], Any]]:
    """Functions of a batch, by name; those whose library is here."""
    every = np.concatenate(known)
    rows = dict(zip(every.tolist(), range(len(every)), strict=True))
    found: dict[str, Any] = {
        "dict": lambda ids: np.array([rows[i] for i in ids.tolist()]),
        "np.unique": partial(np.unique, return_inverse=True),
    }
    with suppress(ImportError):
        found["pandas.factorize"] = import_module("pandas").factorize
    with suppress(ImportError, OSError):  # without what it is built with
        found["torchrec MCH"] = _managed_collision(known)
    return found


def _managed_collision(known: list[np.ndarray]) -> Callable[[np.ndarray], Any]:
    modules = import_module("torchrec.modules.mc_modules")
    jagged, torch = import_module("torchrec.sparse.jagged_tensor"), import_module("torch")
    module = modules.MCHManagedCollisionModule(
        zch_size=sum(map(len, known)), device=torch.device("cpu"),
        eviction_policy=modules.LFU_EvictionPolicy(),
        eviction_interval=1, input_hash_size=2**62,
    )  # fmt: skip

    def look(ids: np.ndarray) -> Any:
        values = torch.from_numpy(ids & (2**62 - 1))
        lengths = torch.tensor([len(ids)])
        features = {"ids": jagged.JaggedTensor(values=values, lengths=lengths)}
        return module.remap(module.profile(features))

    for part in known:
        look(part)
    return look


def _bags(result: SpecialResult) -> None:
    """Batches come twice: first many of the ids are new, then none."""
    jobs = {"row numbers": _bags_of(None), "ids": _bags_of([nn.IdMap(ROWS) for _ in range(TABLES)])}
    times = one_by_one(jobs, rounds=4 * ROUNDS, warm=0)
    of_ids = times.pop("ids")
    times |= {"ids, many new": of_ids[: 2 * ROUNDS], "ids, none new": of_ids[2 * ROUNDS :]}
    label = f"bags of {LENGTH}, {BAGS:,} x {TABLES} tables"
    result.add({f"{label}: {kind}": found[-ROUNDS:] for kind, found in times.items()})


def _bags_of(maps: list[nn.IdMap] | None) -> Job:
    """A forward and a backward of bags of row numbers, or with maps of ids."""
    tables = [np.zeros((ROWS, DIM), np.float32) for _ in range(TABLES)]
    bags = nn.EmbeddingBags(tables, nn.LazyAdam(tables), maps=maps)
    grad = np.full((BAGS, TABLES * DIM), 0.01, np.float32)
    steps, ids, more = itertools.count(), list[np.ndarray](), dict[str, int]()

    def load() -> None:
        k = next(steps)
        rng = np.random.default_rng(k % (2 * ROUNDS))
        drawn = (rng.random((TABLES, BAGS, LENGTH)) ** 4 * (ROWS - 1)).astype(np.int64)
        ids[:] = drawn
        if maps is not None:
            ids[:], more["step"] = map(ids_of, drawn), k

    def step() -> None:
        bags(ids, **more)
        bags.backward(grad)

    return Job(step, load)
