"""Small trainings in MindSpore, with its own optimizers or ours."""

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn

STEPS = 30
Make = Callable[[list[Any]], Any]  # an optimizer of a list of parameters


class Table(nn.Cell):  # type: ignore[misc]
    """A table of vectors and a layer on the mean of those that occur."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(11, 8), nn.Dense(8, 3)

    def construct(self, ids: Any) -> Any:
        return self.out(self.table(ids).mean(1))


def filled(net: Any) -> Any:
    """A net with always the same parameters."""
    rng = np.random.default_rng(0)
    for parameter in net.trainable_params():
        values = 0.3 * rng.standard_normal(parameter.shape).astype(np.float32)
        parameter.set_data(Tensor(values))
    return net


def dense_net() -> Any:
    return filled(nn.SequentialCell(nn.Dense(6, 17), nn.ReLU(), nn.LayerNorm((17,)),
                                    nn.Dense(17, 3)))  # fmt: skip


def table_net() -> Any:
    return filled(Table())


def batches(net: Any) -> list[tuple[Any, Any]]:
    """Inputs and targets of each step."""
    rng, found = np.random.default_rng(1), []
    for _ in range(STEPS):
        ids = rng.integers(11, size=(8, 4)).astype(np.int32)
        values = rng.standard_normal((8, 6)).astype(np.float32)
        target = rng.standard_normal((8, 3)).astype(np.float32)
        found.append((Tensor(ids if isinstance(net, Table) else values), Tensor(target)))
    return found


def losses(net: Any, optimizer: Any, first: int = 0, end: int = STEPS) -> list[float]:
    """The losses of steps by `TrainOneStepCell`."""
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    cell.set_train()
    return [float(cell(x, y).asnumpy()) for x, y in batches(net)[first:end]]


def trained(
    make_net: Callable[[], Any], make: Make, steps: int = STEPS
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of a training, and all that the optimizer has in the end, by name."""
    net = make_net()
    optimizer = make(net.trainable_params())
    found = losses(net, optimizer, 0, steps)
    return found, {p.name: p.asnumpy().copy() for p in optimizer.get_parameters()}


def gradients_like(parameters: Any, value: float = 0.5) -> tuple[Any, ...]:
    return tuple(Tensor(np.full(p.shape, value, np.float32)).astype(p.dtype) for p in parameters)


def parameter(values: Any, name: str = "w", dtype: Any = None) -> Any:
    tensor = Tensor(np.asarray(values, np.float32))
    return mindspore.Parameter(tensor if dtype is None else tensor.astype(dtype), name=name)
