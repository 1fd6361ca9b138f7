"""Cases of the benchmark in small sizes: the checks with which ``bench/gpu.sh`` begins."""

from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from devices import GPU, MARKS, STUB, computed, only
from fusestep import synchronize
from fusestep.bench.buffers import Buffers
from fusestep.bench.cases import steps, subject, workloads
from fusestep.bench.errors import BenchError

pytestmark = [
    pytest.mark.gpu,
    MARKS[-1],  # each has arrays of one framework
    only(STUB, GPU, reason="they are too large for one thread after the other"),
]
# Units in the last place of the largest value, after a few steps; in 16 bits (True) one rounding
# hides the others. Compilers choose for themselves which products and sums become one FMA.
ULPS = {False: 64.0, True: 6.0}


class Check(NamedTuple):
    """A case of the benchmark, and a size that is small and odd."""

    case: str
    size: str
    dtype: str = "float32"
    distribution: str = "zipf1.2"


_TENSORS, _ROWS, _BAGS = "3x1003", "500x64x9000", "3x50x16x100x3"
_TYPES = ("float32", "bfloat16", "float16")
CHECKS = {
    **{f"dense/{name}/{dtype}": Check(f"dense/nn.{name}", _TENSORS, dtype)
       for name in ("SGD", "Adam") for dtype in _TYPES},
    **{f"dense/{name}": Check(f"dense/nn.{name}", _TENSORS)
       for name in ("AdamWeightDecay", "SGD(momentum)", "Momentum", "Adagrad", "Lion", "Adan",
                    "RMSProp(centered)", "FTRL", "Lamb", "LARS", "AdaFactor")},
    "dense/AdaFactor/bfloat16": Check("dense/nn.AdaFactor", "3x9999", "bfloat16"),
    "dense/many": Check("many-small/nn.Adam", ""),
    "rows/LazyAdam": Check("rows/nn.LazyAdam", "500x33x400", distribution="uniform"),
    "rows/LazyAdam/aligned": Check("rows/nn.LazyAdam", _ROWS),
    "rows/LazyAdam/hot": Check("rows/nn.LazyAdam", _ROWS, distribution="equal"),
    "rows/LazyAdam/bfloat16": Check("rows/nn.LazyAdam", _ROWS, "bfloat16"),
    "rows/LazyAdam/sort": Check("rows/nn.LazyAdam", "1Mx1x1000003", distribution="uniform"),
    "rows/Adam/every row": Check("rows/nn.Adam", _ROWS),
    "rows/RowWiseAdagrad": Check("rows/nn.RowWiseAdagrad", _ROWS),
    "rows/RowWiseAdagrad/many": Check("rows/nn.RowWiseAdagrad", "500x256x200000"),
    "rows/RowWiseAdam": Check("rows/nn.RowWiseAdam", _ROWS),
    "rows/Adagrad": Check("rows/nn.Adagrad", _ROWS),
    "rows/FTRL": Check("rows/nn.FTRL", "500x7x9000"),
    "bags/forward": Check("pooled/ops.EmbeddingBags", _BAGS),
    "bags/LazyAdam": Check("pooled/nn.EmbeddingBags(LazyAdam)", _BAGS),
    "bags/RowWiseAdagrad": Check("pooled/nn.EmbeddingBags(RowWiseAdagrad)", _BAGS),
    "ops/FusedSparseAdam": Check("rows/ops.FusedSparseAdam", "300x9x2000"),
    "ops/clip_by_global_norm": Check("dense/ops.clip_by_global_norm", _TENSORS),
    "torch/SGD": Check("dense/nn.torch.SGD(momentum)", _TENSORS),
    "torch/AdamW": Check("dense/nn.torch.AdamW", _TENSORS),
    "torch/AdamW/bfloat16": Check("dense/nn.torch.AdamW", _TENSORS, "bfloat16"),
    "torch/Adagrad/sparse": Check("rows/nn.torch.Adagrad", "90x16x400"),
    "torch/LazyAdam/sparse": Check("rows/nn.torch.LazyAdam", "90x16x400"),
    "torch/LazyAdam/bfloat16": Check("rows/nn.torch.LazyAdam", "90x16x400", "bfloat16"),
}  # fmt: skip


def results(check: Check, put: Any = None) -> list[Any]:
    """Arrays that three steps have updated and found, on the host or where ``put`` copies them."""
    (case,) = (case for case in steps.STEPS if case.name == check.case)
    (point,) = steps.points(
        [case], check.size, [check.dtype], [1], [check.distribution], [steps.LOOP]
    )
    rng = np.random.default_rng(2)
    given = [
        replace(one, start=np.abs(rng.standard_normal(one.shape)))
        for one in workloads.parameters(point.tensors(), 0.0)
    ]
    buffers = Buffers(case.subject.prepare, case.use, subject.DTYPES[check.dtype], given, put)
    job = buffers.job(fresh=False)
    job.load()
    for _ in range(3):
        found = job.step()
    synchronize()
    updated = [array for arrays in buffers.prepared.updated for array in arrays]
    made = found if isinstance(found, tuple) else (found,)
    return [*updated, *(one for one in made if hasattr(one, "dtype"))]


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str) -> None:
    from fusestep.bench.gpu import clock

    try:
        found = results(CHECKS[name], clock.put)
    except BenchError as error:
        pytest.skip(str(error))  # PyTorch is not there
    computed()
    expected = results(CHECKS[name])
    assert len(found) == len(expected)
    for ours, host in zip(map(clock.get, found), expected, strict=True):
        epsilon = float(ml_dtypes.finfo(host.dtype).eps)
        # States of rows are columns on the host.
        a, b = (np.asarray(array, np.float64).reshape(-1) for array in (ours, host))
        assert a.size == b.size
        allowed = ULPS[epsilon > 1e-4] * epsilon * np.abs(b).max(initial=0.0)
        np.testing.assert_allclose(a, b, rtol=0, atol=allowed)
