"""The benchmark of THOR, on small layers."""

from __future__ import annotations

import numpy as np
import pytest

from fusestep import nn
from fusestep.bench.report.result import SpecialResult
from fusestep.bench.special import thor
from fusestep.nn.thor import factors as thor_factors

pytest.importorskip("scipy", reason="the factors are inverted by scipy's LAPACK")


def small() -> thor.Layer:
    record = nn.ThorDense(np.zeros((6, 4), np.float32))
    return thor.Layer(record, (8, 4), (8, 6))


def test_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thor, "LAYERS", {"small": small})
    monkeypatch.setattr(thor, "ROUNDS", 3)
    plain, told = (thor_factors.matmul, thor_factors.load_lapack), []
    result = SpecialResult("thor", "")
    thor.run(result, 1, told.append)
    assert (thor_factors.matmul, thor_factors.load_lapack) == plain
    assert told == sorted(told)
    assert told[-1] == 1.0
    labels = ("two products", "step", "refresh", "refresh outside of BLAS")
    assert set(result.times) == {f"small: {label}" for label in labels}
    assert all(times.samples == 3 for times in result.times.values())
    assert set(result.limits) == {"small: step", "small: refresh outside of BLAS"}
    assert result.times["small: step"].median > result.times["small: two products"].median
    outside = result.times["small: refresh outside of BLAS"].median
    assert 0 < outside < result.times["small: refresh"].median


def test_timers_see_every_call() -> None:
    """Two covariances, two inverses of one block each (three calls), two products."""
    layer = small()
    layer.refresh()
    with thor.Timers() as timers:
        calls: list[str] = []
        matmul, lapack = timers.matmul, timers._lapack

        class Counted:
            def __getattr__(self, name: str) -> object:
                calls.append(name)
                return getattr(lapack, name)

        timers._lapack = Counted()
        thor_factors.matmul = lambda *a, **k: (calls.append("matmul"), matmul(*a, **k))[1]
        layer.refresh()
    assert sorted(calls) == ["dpotrf"] * 2 + ["dtrtri"] * 2 + ["matmul"] * 6
    assert timers.seconds > 0
