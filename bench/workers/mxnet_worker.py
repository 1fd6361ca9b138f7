"""MXNet's steps, for the interpreter in which MXNet is installed.

Its update operators, one call per parameter or, where there is such an operator, for many. The
row-sparse gradient that they take has every row once: the backward of ``Embedding`` adds up the
duplicates, so it belongs to the step. The bias correction of Adam is in the learning rate, where
MXNet's own optimizers have it too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from worker_protocol import LR, Case, Job, Parameter, Replica, lookup, serve

_ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
_RMS: dict[str, Any] = {"gamma1": 0.9, "epsilon": 1e-10}
_MANY = 45  # tensors that all operators for many can take at once; with more they may crash

if TYPE_CHECKING:
    # Of each parameter: itself, its gradient, its states.
    Arrays = Sequence[Sequence[Any]]
    # Takes a step; gets its number, from 1.
    Step = Callable[[int, Arrays], object]

# Steps on row-sparse gradients, and the same step on dense ones. The operators are lazy if they
# are not told otherwise.
_WITH_ROWS = {
    "adam-lazy": "adam",
    "adam-rows": "adam, every row",
    "sgd-rows": "sgd",
    "momentum-lazy": "momentum",
    "adagrad-rows": "adagrad",
    "ftrl-rows": "ftrl",
}


class MXNet:
    """The library, on ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        del threads  # the environment says it
        self.mx: Any = import_module("mxnet")
        self.nd: Any = self.mx.nd
        self.version: str = self.mx.__version__
        self._one = self.nd.ones(1)  # the scale of gradients, where a number is made an array
        self._adagrad_optimizer = self.mx.optimizer.AdaGrad(learning_rate=LR, eps=1e-10)
        self._lars_optimizer = self.mx.optimizer.LARS(
            learning_rate=LR, momentum=0.9, eta=1e-3, eps=1e-5
        )
        self._lars_optimizer.aggregate_num = _MANY
        self._steps = self._make_steps()

    def _make_steps(self) -> dict[str, dict[str, tuple[int, Step]]]:
        """By algorithm and label, the number of states and what takes the step."""
        nd = self.nd
        every_row = _each(nd.adam_update, _rate, lazy_update=False, **_ADAM)
        return {
            "sgd": {
                "sgd_update": (0, _each(nd.sgd_update)),
                "multi_sgd_update": (0, _many(nd.multi_sgd_update)),
            },
            "momentum": {
                "sgd_mom_update": (1, _each(nd.sgd_mom_update, momentum=0.9)),
                "multi_sgd_mom_update": (1, _many(nd.multi_sgd_mom_update, momentum=0.9)),
            },
            "nesterov": {"nag_mom_update": (1, _each(nd.nag_mom_update, momentum=0.9))},
            "adam": {"adam_update": (2, _each(nd.adam_update, _rate, **_ADAM))},
            "adam, every row": {"adam_update(lazy_update=False)": (2, every_row)},
            "adamw": {
                "contrib.adamw_update": (2, self._adamw),
                "contrib.multi_adamw_update": (2, _batches(self._multi_adamw)),
            },
            "rmsprop": {"rmsprop_update": (1, _each(nd.rmsprop_update, **_RMS))},
            "rmsprop-centered": {
                "rmspropalex_update": (3, _each(nd.rmspropalex_update, gamma2=0.0, **_RMS))
            },
            "adagrad": {"optimizer.AdaGrad": (1, self._adagrad)},
            "ftrl": {"ftrl_update": (2, _each(nd.ftrl_update, lamda1=0.0, beta=0.0))},
            "lamb": {
                "lamb_update_phase1, lamb_update_phase2": (2, self._lamb),
                "contrib.multi_lamb_update": (2, _batches(self._multi_lamb)),
            },
            "lars": {"optimizer.LARS": (1, _batches(self._lars))},
            "clip-by-global-norm": {"gluon.utils.clip_global_norm": (0, self._clip)},
        }

    def forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        """Where gradients are row-sparse, only the operators for one parameter.

        There is no bfloat16; float16 is emulated on a CPU, 40 times slower than float32.
        """
        if dtype != "float32":
            return {}
        if algorithm == "gather" and kind == "rows":
            return {form: partial(self._gather, form) for form in ("take", "Embedding")}
        name = algorithm if kind == "dense" else _WITH_ROWS.get(algorithm, "")
        steps = {form: partial(self._replica, *s) for form, s in self._steps.get(name, {}).items()}
        if kind == "dense" or not steps:
            return steps
        form, make = next(iter(steps.items()))
        return {f"Embedding.backward, {form}": make}

    def _replica(self, count: int, take_step: Step, case: Case) -> Replica:
        """Arrays and an operator on them."""
        nd = self.nd
        weights = [self._weight(given, case) for given in case.parameters]
        states = [[self._state(w) for _ in range(count)] for w in weights]
        gradients = [nd.array(given.gradient, dtype=case.dtype) for given in case.parameters]
        lookups = self._look_up(case.parameters, weights)
        originals, numbers = list(gradients), itertools.count(1)

        def load() -> None:
            if case.fresh:
                gradients[:] = [gradient.copy() for gradient in originals]
                nd.waitall()

        def step() -> None:
            arrays = []
            for w, g, looked_up, state in zip(weights, gradients, lookups, states):
                if looked_up is not None:
                    looked_up.backward(g, retain_graph=True)
                    g = w.grad
                arrays.append((w, g, *state))
            take_step(next(numbers), arrays)
            nd.waitall()

        clips = case.algorithm == "clip-by-global-norm"
        return Replica(Job(step, load), lambda: _values(gradients if clips else weights))

    def _weight(self, given: Parameter, case: Case) -> Any:
        """Dense; a table row-sparse with all rows where the operator is lazy only on that."""
        w = self.nd.array(given.start, dtype=case.dtype)
        if given.indices is None:
            return w
        if case.algorithm == "ftrl-rows":
            w = self._all_rows(w)
        w.attach_grad(stype="row_sparse")
        return w

    def _state(self, w: Any) -> Any:
        zeros = self.nd.zeros(w.shape, dtype=w.dtype)
        return zeros if w.stype == "default" else self._all_rows(zeros)

    def _all_rows(self, dense: Any) -> Any:
        rows = self.nd.arange(dense.shape[0], dtype="int64")
        return self.nd.sparse.row_sparse_array((dense, rows), shape=dense.shape)

    def _look_up(self, parameters: list[Parameter], weights: list[Any]) -> list[Any]:
        """Of each table its rows, whose backward can be asked for again and again."""
        with self.mx.autograd.record():
            looked_up = [
                None if given.indices is None else self._embedding(given, w, sparse_grad=True)()
                for given, w in zip(parameters, weights)
            ]
        self.nd.waitall()
        return looked_up

    def _embedding(self, given: Parameter, table: Any, **options: Any) -> Callable[[], Any]:
        indices = self.nd.array(given.indices, dtype="int64")
        sizes = {"input_dim": given.shape[0], "output_dim": given.shape[1]}
        return lambda: self.nd.Embedding(indices, table, **sizes, **options)

    def _gather(self, form: str, case: Case) -> Replica:
        (given,) = case.parameters
        table = self.nd.array(given.start, dtype=case.dtype)
        indices = self.nd.array(given.indices, dtype="int64")
        find = self._embedding(given, table)
        if form == "take":
            find = partial(self.nd.take, table, indices)

        def look_up() -> Any:
            found = find()
            found.wait_to_read()
            return found

        return lookup(look_up, _values)

    def _adamw(self, t: int, arrays: Arrays) -> None:
        """Torch's: the decay is that of the plain learning rate."""
        for w, g, m, v in arrays:
            self.nd.contrib.adamw_update(
                w, g, m, v, self._one, lr=_rate(t), eta=1.0, wd=LR * 0.01, out=w, **_ADAM
            )

    def _multi_adamw(self, t: int, w: Any, g: Any, m: Any, v: Any) -> None:
        rates = _of_each(w, lrs=_rate(t), wds=LR * 0.01, etas=1.0)
        self.nd.contrib.multi_adamw_update(w, g, m, v, self._one, out=w, **rates, **_ADAM)

    def _adagrad(self, _: int, arrays: Arrays) -> None:
        for index, (w, g, history) in enumerate(arrays):
            self._adagrad_optimizer.update(index, w, g, history)

    def _lars(self, _: int, w: Any, g: Any, m: Any) -> None:
        self._lars_optimizer.update(list(range(len(w))), w, g, m)

    def _lamb(self, t: int, arrays: Arrays) -> None:
        nd = self.nd
        for w, g, m, v in arrays:
            update = nd.lamb_update_phase1(w, g, m, v, t=t, wd=0.0, epsilon=1e-6)
            nd.lamb_update_phase2(w, update, w.norm(), update.norm(), lr=LR, out=w)

    def _multi_lamb(self, t: int, w: Any, g: Any, m: Any, v: Any) -> None:
        rates = _of_each(w, lrs=LR, wds=0.0)
        self.nd.contrib.multi_lamb_update(w, g, m, v, (t,) * len(w), out=w, epsilon=1e-6, **rates)

    def _clip(self, _: int, arrays: Arrays) -> None:
        self.mx.gluon.utils.clip_global_norm([g for _, g in arrays], 1.0, check_isfinite=False)


def _rate(t: int) -> float:
    """The learning rate of Adam with its bias correction."""
    return float(LR * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t))


def _of_each(arrays: Sequence[Any], **numbers: float) -> dict[str, tuple[float, ...]]:
    """Numbers that operators on many take for each array."""
    return {name: (number,) * len(arrays) for name, number in numbers.items()}


def _each(operator: Any, rate: Callable[[int], float] = lambda _: LR, **numbers: float) -> Step:
    """An operator on one parameter after the other."""

    def step(t: int, arrays: Arrays) -> None:
        for w, g, *states in arrays:
            operator(w, g, *states, lr=rate(t), out=w, **numbers)

    return step


def _batches(take_step: Callable[..., object]) -> Step:
    """An operator on many parameters: on lists of weights, of gradients and of each state."""

    def step(t: int, arrays: Arrays) -> None:
        for start in range(0, len(arrays), _MANY):
            take_step(t, *map(list, zip(*arrays[start : start + _MANY])))

    return step


def _many(operator: Any, **numbers: float) -> Step:
    """An operator that takes the arrays of many parameters in a row."""

    def step(_: int, *kinds: list[Any]) -> None:
        flat = [array for parameter in zip(*kinds) for array in parameter]
        rates = _of_each(kinds[0], lrs=LR, wds=0.0)
        operator(*flat, out=kinds[0], num_weights=len(kinds[0]), **rates, **numbers)

    return _batches(step)


def _values(arrays: Sequence[Any]) -> list[np.ndarray]:
    return [array.asnumpy() for array in arrays]


if __name__ == "__main__":
    serve(MXNet)
