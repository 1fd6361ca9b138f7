"""Row-wise Adagrad beside runs of FBGEMM's EXACT_ROWWISE_ADAGRAD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusestep import nn

import recorded

RUN = np.load(recorded.DATA / "fbgemm" / "rowwise_adagrad.npz")
DECAYS = {
    "none": {},
    "l2": {"weight_decay": 0.1},
    "decouple": {"weight_decay": 0.1, "decoupled_weight_decay": True},
}


@pytest.mark.parametrize("mode", DECAYS)
def test_steps_are_those_of_fbgemm(mode: str) -> None:
    """Lookups of one row each, many of them equal: the table and the accumulators of its rows."""
    table = nn.Parameter(RUN["w0"].copy(), "table")
    options: dict[str, Any] = {"learning_rate": 0.05, "eps": 1e-8, **DECAYS[mode]}
    opt = nn.RowWiseAdagrad([table], **options)
    for k, (ids, gradient) in enumerate(zip(RUN["ids"], RUN["grads"], strict=True)):
        opt((nn.RowTensor(ids, gradient, table.shape),))
        # Sums of up to 20 float32 rows, in another order.
        np.testing.assert_allclose(table.data, RUN[f"{mode}/w"][k], rtol=3e-6, atol=1e-6)
        np.testing.assert_allclose(opt.accum[0], RUN[f"{mode}/momentum1"][k], rtol=2e-6)


def test_what_the_run_tells_apart() -> None:
    """Rows that do not occur stay, but each decay moves the others to another place."""
    untouched = np.setdiff1d(np.arange(len(RUN["w0"])), RUN["ids"])
    assert 0 < len(untouched) < len(RUN["w0"])
    for mode in DECAYS:
        assert (RUN[f"{mode}/w"][-1][untouched] == RUN["w0"][untouched]).all()
    for one, other in (("none", "l2"), ("none", "decouple"), ("l2", "decouple")):
        assert np.abs(RUN[f"{one}/w"][-1] - RUN[f"{other}/w"][-1]).max() > 1e-3
