"""Whose memory a step writes, when, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore.nn", reason="MindSpore is not installed")

import mindspore
from mindspore import Tensor, nn, ops
from mindspore.common.sparse_tensor import RowTensorInner

from fusestep import nn as ours
from fusestep.nn import mindspore as fused

from mindspore_training import batches, dense_net, gradients_like, losses, parameter


def rows(indices: Any, values: Any, shape: tuple[int, ...]) -> Any:
    return RowTensorInner(Tensor(np.array(indices, np.int32)), Tensor(values), shape)


def test_a_step_writes_into_mindspores_memory() -> None:
    w = parameter(np.ones((3, 4)))
    view, optimizer = w.asnumpy(), fused.SGD([w], learning_rate=0.5)
    optimizer(gradients_like([w]))
    assert (view == 0.75).all() and w.data_ptr() == view.ctypes.data


@pytest.mark.parametrize("of_state", [False, True])
def test_memory_that_moved_is_found(of_state: bool) -> None:
    w = parameter(np.ones((3, 4)))
    optimizer = fused.Momentum([w], learning_rate=0.5, momentum=0.5)
    optimizer(gradients_like([w]))
    (changed,) = optimizer.moments if of_state else [w]
    before, address = changed.asnumpy(), changed.data_ptr()
    kept = before.copy()
    changed.set_data(Tensor(np.full((3, 4), 3.0, np.float32)))
    assert changed.data_ptr() != address
    optimizer(gradients_like([w]))
    moment = 3.0 * 0.5 + 0.5 if of_state else 0.5 * 0.5 + 0.5
    assert (optimizer.moments[0].asnumpy() == moment).all()
    assert (w.asnumpy() == (0.75 if of_state else 3.0) - 0.5 * moment).all()
    assert (before == kept).all()  # the old memory is nobody's business any more
    ops.assign(w, Tensor(np.zeros((3, 4), np.float32)))
    optimizer(gradients_like([w], 0.0))
    assert (w.asnumpy() == -0.25 * moment).all()


def test_a_step_waits_for_readers_that_are_queued() -> None:
    """Ten times, products of the old parameter are still to be computed when the step begins."""
    n = 1200
    w, x = parameter(np.ones((n, n))), Tensor(np.ones((n, n), np.float32))
    optimizer, gradient = fused.SGD([w], learning_rate=1.0), gradients_like([w], -3.0)
    optimizer(gradient)
    for _ in range(10):
        ops.assign(w, x)
        products = [ops.matmul(x, w) for _ in range(4)]
        optimizer(gradient)
        assert all((y.asnumpy() == n).all() for y in products)
        assert (w.asnumpy() == 4).all()


@pytest.mark.parametrize("name", ["Adam", "LazyAdam", "FTRL", "ProximalAdagrad", "Momentum"])
def test_row_sparse_gradients(name: str) -> None:
    more = {"momentum": 0.9, "sparse_update": "lazy"} if name == "Momentum" else {}
    w, array = parameter(np.ones((6, 4))), np.ones((6, 4), np.float32)
    optimizer = getattr(fused, name)([w], learning_rate=0.1, **more)
    own = getattr(ours, name)([ours.Parameter(array, "w")], learning_rate=0.1, **more)
    rng = np.random.default_rng(0)
    for _ in range(3):
        indices = rng.integers(6, size=5).astype(np.int32)
        values = rng.standard_normal((5, 4)).astype(np.float32)
        optimizer((rows(indices, values, (6, 4)),))
        own([ours.RowTensor(indices, values, (6, 4))])
    np.testing.assert_array_equal(w.asnumpy(), array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(dtype: str) -> None:
    w = parameter(np.ones(5), dtype=getattr(mindspore, dtype))
    optimizer = fused.Momentum([w], learning_rate=0.5, momentum=0.5)
    for _ in range(2):
        optimizer(gradients_like([w]))
    assert (w.astype(mindspore.float32).asnumpy() == 0.375).all()


def unchanged(optimizer: Any, gradients: Any, error: Any, text: str) -> None:
    before = [(p, p.astype(mindspore.float64).asnumpy()) for p in optimizer.get_parameters()]
    with pytest.raises(error, match=text):
        optimizer(gradients)
    for p, values in before:
        np.testing.assert_array_equal(p.astype(mindspore.float64).asnumpy(), values)


def test_gradients_that_do_not_fit() -> None:
    w, b = parameter(np.ones((6, 4)), "w"), parameter(np.ones(4), "b")
    optimizer = fused.LazyAdam([w, b])
    good = gradients_like([w, b])
    optimizer(good)
    values = np.ones((2, 4), np.float32)
    unchanged(optimizer, (Tensor(values), good[1]), ValueError,
              r"gradient of 'w' has a wrong shape: .*EmbeddingLookup\(sparse=True\)")  # fmt: skip
    unchanged(optimizer, (None, good[1]), TypeError, "gradient of 'w' has a wrong type")
    unchanged(optimizer, good[:1], ValueError, "gradients has a wrong length: expected 2")
    unchanged(optimizer, (good[0], Tensor([1, 2, 3, 4])), TypeError, "gradient of 'b' .* dtype")
    bad = rows([0, 6], values, (6, 4))
    unchanged(optimizer, (bad, good[1]), IndexError, r"indices\[1\] is out of range")
    unchanged(optimizer, (rows([0, 1], values, (7, 4)), good[1]), ValueError, "dense_shape")
    plain = fused.Momentum([w, b], 0.1, 0.9)
    unchanged(plain, (rows([0, 1], values, (6, 4)), good[1]), ValueError, "is row-sparse")
    around = fused.LARS(fused.LazyAdam([w, b]))
    unchanged(around, (rows([0, 1], values, (6, 4)), good[1]), ValueError, "is row-sparse")


def test_a_lookup_whose_gradient_has_no_indices() -> None:
    class Net(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingLookup(10, 3, sparse=True, target="CPU")

        def construct(self, ids: Any) -> Any:
            return self.table(ids)

    net = Net()
    cell = nn.TrainOneStepCell(
        nn.WithLossCell(net, nn.MSELoss()), fused.Adam(net.trainable_params())
    )
    with pytest.raises(ValueError, match="without their indices on a CPU"):
        cell(Tensor(np.array([1, 2], np.int32)), Tensor(np.zeros((2, 3), np.float32)))


def test_parameters_that_cannot_be_shared_any_more() -> None:
    w = parameter(np.ones((6, 4)))
    optimizer, gradient = fused.Adam([w]), gradients_like([w])
    optimizer(gradient)
    w.set_data(Tensor(np.ones((12, 4), np.float32))[6:])
    unchanged(optimizer, gradient, ValueError, "parameter 'w' cannot be shared")
    w.set_data(ops.transpose(Tensor(np.ones((4, 6), np.float32)), (1, 0)))
    unchanged(optimizer, gradient, ValueError, "parameter 'w' cannot be shared")
    w.set_data(Tensor(np.ones((6, 4), np.float32)))
    optimizer(gradient)
    net = dense_net()
    optimizer = fused.Adam(net.trainable_params())
    losses(net, optimizer, 0, 1)
    gradients = gradients_like(net.trainable_params())
    net.to(mindspore.float16)
    unchanged(optimizer, gradients, TypeError, "has another dtype than at construction")


def test_arguments_that_do_not_fit() -> None:
    w = parameter(np.ones(3))
    with pytest.raises(ValueError, match="already exists"):
        fused.Adam([w, parameter(np.ones(3))])  # two of one name
    with pytest.raises(KeyError, match="did you mean 'learning_rate'"):
        fused.Adam([w], learnin_rate=0.1)
    with pytest.raises(ValueError, match="sparse_update is unknown"):
        fused.Adam([w], sparse_update="some")
    with pytest.raises(TypeError, match="expected one of fusestep"):
        fused.LARS(nn.Momentum([w], 0.1, 0.9))
    with pytest.raises(TypeError, match="wrong dtype"):
        fused.SGD([mindspore.Parameter(Tensor([1, 2]), name="i")])
    optimizer = fused.SGD([w], learning_rate=[0.1, 0.1])
    for _ in range(2):
        optimizer(gradients_like([w]))
    unchanged(optimizer, gradients_like([w]), RuntimeError, "learning_rate has no value for step 2")


def test_graphs_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)  # MindSpore writes what it could not compile
    net = dense_net()
    optimizer = fused.Adam(net.trainable_params())
    x, y = batches(net)[0]
    forward = nn.WithLossCell(net, nn.MSELoss())
    gradients_of = mindspore.value_and_grad(forward, None, optimizer.parameters)

    @mindspore.jit  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        loss, gradients = gradients_of(x, y)
        optimizer(gradients)
        return loss

    with pytest.raises(RuntimeError, match="fused_step_in_pynative_mode"):
        step(x, y)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        with pytest.raises(RuntimeError, match=r"expected PyNative mode .* got graph mode"):
            fused.Adam(net.trainable_params())
        with pytest.raises(RuntimeError, match="fused_step_in_pynative_mode"):
            nn.TrainOneStepCell(forward, optimizer)(x, y)
    finally:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    assert optimizer.global_step.asnumpy() == 0


def test_a_step_that_is_not_finite_is_skipped() -> None:
    w = parameter(np.ones(3))
    optimizer = fused.Adam([w], skip_nonfinite=True)
    optimizer(gradients_like([w], np.inf))
    assert (w.asnumpy() == 1).all() and optimizer.skipped_steps == 1
    assert optimizer.global_step.asnumpy() == 0 and optimizer.beta1_power.asnumpy() == 1
    optimizer(gradients_like([w]))
    assert optimizer.global_step.asnumpy() == 1 and optimizer.beta1_power.asnumpy() != 1
