"""Checks of a first run on a CUDA device, smallest first, against results of the host.

    python -m fusestep.bench.gpu.checks NAME       run one; exit 0: right, 3: wrong, 4: not computed
    python -m fusestep.bench.gpu.checks --known    write the results of the host anew

An address that is out of bounds or misaligned ends the work of its whole process on the device, so
each check has a process of its own. Of every result the file has some elements and the sums of
blocks, so that no loop is compiled for the host where the device is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fusestep
from fusestep import nn, ops

from ...kernels.storage import STORAGES

KNOWN = Path(__file__).parent / "checks.npz"
WRONG, NOT_COMPUTED = 3, 4  # exit statuses
STUB = "driver without a device"
"""In the name of the device of a driver that takes launches and runs none of them."""
SAMPLES, BLOCKS = 192, 16  # of a result
# Units in the last place of the largest value, after a few steps; in 16 bits (True) one rounding
# hides the others. Compilers choose for themselves which products and sums become one FMA.
ULPS = {False: 64.0, True: 6.0}
SHAPES = ((257, 64), (1_003,), (3, 5, 7), ())
DTYPES = {dtype.name: dtype for dtype in STORAGES}
BFLOAT16, F32, F64 = (DTYPES[name] for name in ("bfloat16", "float32", "float64"))
_finfo: Callable[[Any], Any] = ml_dtypes.finfo
EPSILON = {dtype: float(_finfo(dtype).eps) for dtype in DTYPES.values()}


class Host:
    """Where a check runs: how arrays get there and back."""

    torch = "cpu"

    def put(self, array: np.ndarray) -> Any:
        """A copy there."""
        return array.copy()

    def get(self, array: Any) -> np.ndarray:
        """A copy on the host."""
        return np.array(array)

    def sort(self, keys: np.ndarray, bits: int, row_bits: int) -> np.ndarray:  # noqa: ARG002
        """Sorted keys."""
        return np.sort(keys)


class Device(Host):
    """The current CUDA device, with arrays of Numba."""

    torch = "cuda"

    def put(self, array: np.ndarray) -> Any:
        """A copy there, also of what `numba.cuda.to_device` does not know."""
        from numba import cuda

        from ...kernels.cuda.device.backend import address_of, copy_in

        there = cuda.device_array(array.shape, array.dtype)
        if array.size:
            copy_in(address_of(there), np.ascontiguousarray(array), cuda.default_stream())
        return there

    def get(self, array: Any) -> np.ndarray:
        """A copy on the host."""
        from ...ops.runtime.device import DeviceArray

        found = array
        if not isinstance(array, DeviceArray):
            found = DeviceArray.adopt("check", "array", array)
        assert found is not None
        copied: np.ndarray = found.numpy()
        return copied

    def sort(self, keys: np.ndarray, bits: int, row_bits: int) -> np.ndarray:
        """Keys that this package has sorted there."""
        from numba import cuda

        from ...kernels.cuda.device.backend import address_of
        from ...kernels.cuda.rows.sort import scratch_words, sort_keys

        n = len(keys)
        rooms = [self.put(keys), *(cuda.device_array(k, np.int64) for k in (n, scratch_words(n)))]
        addresses = given, spare, scratch = [address_of(room) for room in rooms]
        at = sort_keys(given, spare, scratch, n, bits, row_bits, cuda.default_stream())
        return self.get(rooms[addresses.index(at)])


Check = Callable[[Host], list[np.ndarray]]


def normal(seed: int, shape: tuple[int, ...], dtype: Any = F32) -> np.ndarray:
    """Normal numbers, the same in every run."""
    return np.array(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def _results(optimizer: Any) -> list[np.ndarray]:
    """Parameters, then states by name."""
    fusestep.synchronize()
    states = optimizer.state_dict()
    numbers = [np.asarray(states[name]) for name in sorted(states)]
    known = [array for array in numbers if array.dtype in EPSILON]
    return [*(p.asnumpy() for p in optimizer.parameters), *known]


def dense(
    make: Callable[[list[Any]], Any], dtype: Any = F32, shapes: Sequence[Any] = SHAPES
) -> Check:
    """Three steps with dense gradients."""

    def run(there: Host) -> list[np.ndarray]:
        parameters = [
            nn.Parameter(there.put(normal(k, shape, dtype)), f"p{k}")
            for k, shape in enumerate(shapes)
        ]
        optimizer = make(parameters)
        for step in range(1, 4):
            optimizer(
                tuple(there.put(normal(100 * step + k, s, dtype)) for k, s in enumerate(shapes))
            )
        return _results(optimizer)

    return run


def rows(
    make: Callable[[list[Any]], Any],
    width: int = 64,
    dtype: Any = F32,
    ids: Any = np.int64,
    hot: int = 0,
    batch: int = 9_000,
) -> Check:
    """Two steps with rows of a table, one of which occurs ``hot`` times."""
    shape = 500, width

    def run(there: Host) -> list[np.ndarray]:
        optimizer = make([nn.Parameter(there.put(normal(0, shape, dtype)), "table")])
        for step in (1, 2):
            drawn = np.random.default_rng(step).integers(0, shape[0], batch).astype(ids)
            drawn[:hot] = 7
            values = there.put(normal(9 + step, (batch, width), dtype))
            optimizer((nn.RowTensor(there.put(drawn), values, shape),))
        return _results(optimizer)

    return run


def sort(n: int) -> Check:
    """Keys of rows of 20 bits and of positions."""
    bits = max(1, (n - 1).bit_length())

    def run(there: Host) -> list[np.ndarray]:
        keys = np.random.default_rng(n).integers(0, 1 << 20, n) << bits | np.arange(n)
        return [there.sort(keys, bits, 20)]

    return run


def bags(pooling: str, gradient: Any = F32, widths: Sequence[int] = (4, 16, 2)) -> Check:
    """Pooled rows, and a step on the gradient of the output."""

    def run(there: Host) -> list[np.ndarray]:
        tables = [
            nn.Parameter(there.put(normal(k, (50, width))), f"t{k}")
            for k, width in enumerate(widths)
        ]
        optimizer = nn.LazyAdam(tables, 0.1)
        pooled = nn.EmbeddingBags(tables, optimizer, pooling)
        drawn = [np.random.default_rng(k).integers(0, 50, 300) for k in range(len(widths))]
        out = pooled([there.put(own) for own in drawn], [there.put(np.arange(0, 301, 3))] * 3)
        pooled.backward(there.put(normal(5, (100, sum(widths)), gradient)))
        return [*_results(optimizer), there.get(out)]

    return run


def all_rows_of_operator(there: Host) -> list[np.ndarray]:
    """`ops.FusedSparseAdam`: every row, those that occur with their summed gradients."""
    arrays = var, m, v = [there.put(np.abs(normal(k, (300, 9)))) for k in range(3)]
    ids = there.put(np.random.default_rng(1).integers(0, 300, 2_000))
    scalars = 0.9, 0.999, 0.01, 0.9, 0.999, 1e-8
    ops.FusedSparseAdam()(var, m, v, *scalars, there.put(normal(5, (2_000, 9))), ids)
    fusestep.synchronize()
    return [there.get(array) for array in arrays]


def coalesced(there: Host) -> list[np.ndarray]:
    """Rows that occur twice and more, summed."""
    ids = np.random.default_rng(1).integers(0, 60, 1_000)
    values = there.put(normal(1, (1_000, 12)))
    found = nn.RowTensor(there.put(ids), values, (60, 12)).coalesce()
    return [there.get(found.indices), there.get(found.values)]


def clipped(there: Host) -> list[np.ndarray]:
    """The norm of all gradients, and gradients that are scaled to it."""
    arrays = [there.put(normal(k, shape)) for k, shape in enumerate(SHAPES)]
    found = ops.clip_by_global_norm(arrays, 1.5)
    return [there.get(array) for array in found]


def bad_index(there: Host) -> list[np.ndarray]:
    """A step that writes nothing, and an `IndexError`."""
    table = nn.Parameter(there.put(normal(0, (50, 8))), "table")
    optimizer = nn.LazyAdam([table], 0.1)
    ids = there.put(np.array([3, 50, 7]))
    raised = 0.0
    try:
        optimizer((nn.RowTensor(ids, there.put(normal(1, (3, 8))), (50, 8)),))
        fusestep.synchronize()
    except IndexError:
        raised = 1.0
    return [np.array([raised]), table.asnumpy()]


def of_torch(name: str, dtype: str = "float32", **options: Any) -> Check:
    """Three steps of a class of ``nn.torch``; the third tensor has sparse gradients or none."""
    takes_sparse = "sparse" in options

    def run(there: Host) -> list[np.ndarray]:
        import torch

        from fusestep.nn import torch as fused

        generator, kind = torch.Generator().manual_seed(1), getattr(torch, dtype)

        def drawn(*shape: int) -> Any:
            return torch.randn(shape, generator=generator).to(kind).to(there.torch)

        parameters = [torch.nn.Parameter(drawn(*shape)) for shape in ((64, 33), (7,), (90, 16))]
        optimizer = getattr(fused, name)(parameters, lr=0.1, **options)
        for _ in range(3):
            for p in parameters[: 2 if takes_sparse else 3]:
                p.grad = drawn(*p.shape)
            if takes_sparse:
                ids = torch.randint(0, 90, (1, 400), generator=generator).to(there.torch)
                parameters[2].grad = torch.sparse_coo_tensor(
                    ids, drawn(400, 16), (90, 16), check_invariants=False
                )
            fused.clip_grad_norm_(parameters[:2], 3.0)
            optimizer.step()
        fusestep.synchronize()
        states = [s for p in parameters for s in optimizer.state[p].values() if torch.is_tensor(s)]
        return [t.detach().double().cpu().numpy() for t in (*parameters, *states)]

    return run


def scaled(there: Host) -> list[np.ndarray]:
    """`torch.amp.GradScaler`: a step that is skipped, and two that are taken."""
    import torch

    from fusestep.nn import torch as fused

    generator = torch.Generator().manual_seed(1)
    p = torch.nn.Parameter(torch.randn(33, 7, generator=generator).to(there.torch))
    optimizer = fused.AdamW([p], lr=0.1)
    scaler = torch.amp.GradScaler(there.torch, init_scale=1024.0)
    for step in range(3):
        gradient = torch.randn(33, 7, generator=generator).to(there.torch)
        gradient[0, 0] = float("inf") if step == 1 else 1.0
        p.grad = scaler.scale(gradient)
        scaler.step(optimizer)
        scaler.update()
    return [p.detach().cpu().numpy(), np.array([scaler.get_scale()])]


def bags_of_torch(there: Host) -> list[np.ndarray]:
    """`nn.torch.EmbeddingBags`: steps in backward, of one call and of two, and gradients left."""
    import torch

    from fusestep.nn import torch as fused

    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(there.torch)

    def ids(*shape: int) -> Any:
        return torch.randint(0, 50, shape, generator=generator).to(there.torch)

    tables = [
        torch.nn.EmbeddingBag(50, 16, mode="sum", _weight=drawn(50, 16), padding_idx=3),
        torch.nn.Embedding(50, 4, padding_idx=0, _weight=drawn(50, 4)),
    ]
    bags = fused.EmbeddingBags(tables)
    optimizer = fused.LazyAdam(bags.parameters(), lr=0.1)
    offsets, singles = torch.arange(0, 300, 3).to(there.torch), torch.arange(100).to(there.torch)
    out = bags([ids(300), ids(100)], [offsets, singles], [drawn(300), drawn(100)])
    (out * drawn(100, 20)).sum().backward()
    optimizer.step()
    bags.update_in_backward(optimizer)
    for n_calls in (1, 2):
        calls = [bags([ids(100, 3), ids(100)]) for _ in range(n_calls)]
        sum((own * drawn(100, 20)).sum() for own in calls).backward()
    fusestep.synchronize()
    return [t.detach().cpu().numpy() for t in (*bags.weights, out)]


def _lazy(parameters: list[Any]) -> Any:
    return nn.LazyAdam(parameters, 0.1)


def _sweeping(parameters: list[Any]) -> Any:
    return nn.Adam(parameters, 0.1, sparse_update="dense_equivalent")


def _centralized(parameters: list[Any]) -> Any:
    return nn.Momentum([{"params": parameters, "grad_centralization": True}], 0.1, 0.9)


CHECKS: dict[str, tuple[Check, np.dtype[Any]]] = {
    **{f"dense/SGD/{n}": (dense(lambda p: nn.SGD(p, 0.1), d), d) for n, d in DTYPES.items()},
    **{f"dense/Adam/{n}": (dense(lambda p: nn.Adam(p, 0.1, weight_decay=0.1), d), d)
       for n, d in DTYPES.items()},
    "dense/AdamWeightDecay": (dense(lambda p: nn.AdamWeightDecay(p, 0.1)), F32),
    "dense/Momentum": (dense(lambda p: nn.Momentum(p, 0.1, 0.9, use_nesterov=True)), F32),
    "dense/Adagrad": (dense(lambda p: nn.Adagrad(p, learning_rate=0.1)), F32),
    "dense/RMSProp": (dense(lambda p: nn.RMSProp(p, 0.1, centered=True)), F32),
    "dense/FTRL": (dense(lambda p: nn.FTRL(p, learning_rate=0.1, l1=0.01)), F32),
    "dense/Lamb": (dense(lambda p: nn.Lamb(p, 0.1)), F32),
    "dense/LARS": (dense(lambda p: nn.LARS(nn.Momentum(p, 0.1, 0.9), coefficient=0.1)), F32),
    "dense/AdaFactor": (
        dense(nn.AdaFactor, F32, ((257, 64), (70, 30, 3, 3), (9_000, 1), (1_003, 777))), F32),
    "dense/AdaFactor/bfloat16": (dense(nn.AdaFactor, BFLOAT16, ((257, 64), (103, 77))), BFLOAT16),
    "dense/centralized": (dense(_centralized, F32, ((60, 9), (2, 100_003))), F32),
    **{f"sort/{n}": (sort(n), F64) for n in (1, 2_047, 2_048, 2_049, 1_000_003)},
    "rows/LazyAdam": (rows(_lazy, 33, batch=400), F32),
    "rows/LazyAdam/aligned": (rows(_lazy), F32),
    "rows/LazyAdam/hot": (rows(_lazy, hot=6_000, ids=np.int32), F32),
    "rows/LazyAdam/bfloat16": (rows(_lazy, dtype=BFLOAT16), BFLOAT16),
    "rows/Adam/every row": (rows(_sweeping), F32),
    "rows/RowWiseAdagrad": (
        rows(lambda p: nn.RowWiseAdagrad(p, learning_rate=0.1), hot=2_000), F32),
    "rows/FTRL": (rows(lambda p: nn.FTRL(p, learning_rate=0.1), 7, hot=600), F32),
    **{f"bags/{pooling}": (bags(pooling), F32) for pooling in ("sum", "mean", "max")},
    "bags/max/float64 gradient": (bags("max", F64, (2, 4, 6)), F32),
    "ops/FusedSparseAdam": (all_rows_of_operator, F32),
    "ops/RowTensor.coalesce": (coalesced, F32),
    "ops/clip_by_global_norm": (clipped, F32),
    "bad index": (bad_index, F32),
    "torch/SGD": (of_torch("SGD", momentum=0.9), F32),
    "torch/AdamW": (of_torch("AdamW"), F32),
    "torch/AdamW/bfloat16": (of_torch("AdamW", "bfloat16"), BFLOAT16),
    "torch/Adagrad/sparse": (of_torch("Adagrad", sparse="touched"), F32),
    "torch/LazyAdam/sparse": (of_torch("LazyAdam", sparse="touched"), F32),
    "torch/GradScaler": (scaled, F32),
    "torch/EmbeddingBags": (bags_of_torch, F32),
}  # fmt: skip


def digest(results: Sequence[np.ndarray], narrowest: np.dtype[Any]) -> tuple[np.ndarray, ...]:
    """Elements and sums of blocks of all results, and the error that each may have."""
    found = [np.array([array.size for array in results], np.float64)]
    allowed = [np.zeros(len(results))]
    for array in results:
        flat = array.reshape(-1)
        wide = flat.astype(np.float64)
        places = np.linspace(0, flat.size - 1, min(flat.size, SAMPLES)).astype(np.int64)
        bounds = np.linspace(0, flat.size, min(BLOCKS, max(1, flat.size // SAMPLES)) + 1)
        blocks = np.array_split(wide, bounds.astype(np.int64)[1:-1])
        samples = wide[places]
        error = 0.0
        if array.dtype in EPSILON:
            epsilon = max(EPSILON[array.dtype], EPSILON[narrowest])
            error = ULPS[epsilon > 1e-4] * epsilon * float(np.abs(samples).max(initial=0.0))
        found += [samples, np.array([block.sum() for block in blocks])]
        allowed += [np.full(len(samples), error), np.array([error * len(b) for b in blocks])]
    return np.concatenate(found), np.concatenate(allowed)


def write_known() -> None:
    """Write the results of the host of all checks to the file that is committed."""
    known: dict[str, Any] = {}
    for name, (check, narrowest) in CHECKS.items():
        values, allowed = digest(check(Host()), narrowest)
        known[f"{name}/values"] = values
        known[f"{name}/allowed"] = allowed.astype(np.float32)
    np.savez_compressed(KNOWN, **known)
    print(f"{len(CHECKS)} checks, {KNOWN.stat().st_size:,} bytes")


def compare(name: str, results: Sequence[np.ndarray]) -> dict[str, Any]:
    """How far results of a check are from those of the host, in units of what is allowed."""
    with np.load(KNOWN) as known:
        values, allowed = known[f"{name}/values"], known[f"{name}/allowed"].astype(np.float64)
    found, _ = digest(results, CHECKS[name][1])
    if found.shape != values.shape:
        return {"is_computed": True, "off": None, "text": f"{found.shape}, not {values.shape}"}
    error = np.abs(found - values)
    same = (found == values) | (np.isnan(found) & np.isnan(values))
    off = np.where(same, 0.0, error / np.maximum(allowed, 1e-300))
    off[np.isnan(off)] = np.inf
    return {
        "is_computed": True,
        "off": min(float(off.max()), 1e30),
        "is_same": bool(same.all()),
        "at": int(off.argmax()),
        "wrong": int((off > 1).sum()),
        "of": len(off),
    }


def run(name: str) -> dict[str, Any]:
    """Run a check on the device, and compare its results where that computes any."""
    from numba import cuda

    results = CHECKS[name][0](Device())
    device = cuda.get_current_device().name
    if STUB in (device.decode() if isinstance(device, bytes) else str(device)):
        return {"is_computed": False, "results": len(results)}
    return compare(name, results)


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    if [*arguments] == ["--known"]:
        write_known()
        return 0
    if len(arguments) != 1 or arguments[0] not in CHECKS:
        print(f"expected --known or one of {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    found = run(arguments[0])
    print(json.dumps(found))
    if not found["is_computed"]:
        return NOT_COMPUTED
    return 0 if found["off"] is not None and found["off"] <= 1 else WRONG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
