"""Optimizers that live for some steps of a sequence, kept or made anew from their state each time.

What is made anew has nothing but arrays from before: parameters, states and counts. It says what
the optimizer that is kept must do.
"""

import copy
import gc
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import optimizers as table
import reference
import sequence_arrays as arrays
from exact_steps import exact_step
from fusestep import nn

from optimizers import (  # isort: skip
    ALL_FORMS, BY_NAME, FIXED_RATE, FORMS, OWN_RATE, decayed_and_scaled, inner)  # fmt: skip
from sequence_arrays import DTYPES, F32, F64, OTHER, Memory, pick
from sequence_operators import Call, assert_near

_FAULTS = ("length", "read-only")
_FAULTS_OF_ROWS = ("dense_shape", "index")
# A difference of nearly equal numbers, under a root.
_CANCELLING = ("elementwise.rmsprop_centered",)
_FAULTS_OF_ARRAYS = ("shape", "dtype", "not finite", "shared")


def halving(step: int) -> float:
    """A schedule."""
    return 0.2 * 0.5 ** (step % 7)


class Trained:
    """One optimizer with its parameters.

    Args:
        rng: what it is.
        kept: whether it lives from step to step.
        number: decides its form and the dtype beside float32, so that a sequence has few kernels.
    """

    def __init__(
        self, rng: np.random.Generator, memory: Memory, *, kept: bool, number: int
    ) -> None:
        self._kept, self._of_gradients = kept, Memory(1 << 22)
        self.form = list(FORMS)[number % len(FORMS)]
        memory.forget()
        self._dtype = DTYPES[number % len(DTYPES)]
        self._mixes = number // 3 % 3 == 1  # gradients of another dtype
        self._data, self._names = [], []
        for i in range(int(rng.integers(1, 6))):
            dtype, shape = pick(rng, (F32, self._dtype)), self._shape(rng)
            self._data.append(memory.positive(rng, shape, dtype))
            self._names.append(f"p{i}" if rng.random() < 0.8 else f"beta{i}")
        self._options = self._random_options(rng, number)
        self._groups = self._random_groups(rng) if rng.random() < 0.4 else None
        self._assigned: dict[str, Any] = {}
        # Few, so that they come again after others.
        self._patterns = [[self._kind(rng, w) for w in self._data] for _ in range(3)]
        self._kinds = self._patterns[0]
        self._skipped, self._was_pickled = 0, False
        self._old: list[np.ndarray] = []  # where parameters have been
        opt = self._built()
        self._state = _copied(opt.state_arrays())
        self._snapshot = opt.state_dict()
        self._opt = opt if kept else None

    def _shape(self, rng: np.random.Generator) -> tuple[int, ...]:
        if self.form.startswith(("AdaFactor", "LARS-AdaFactor")) or rng.random() < 0.5:
            return arrays.shape(rng, arrays.size(rng, 140_000))
        return arrays.table(rng)[0]

    def _random_options(self, rng: np.random.Generator, number: int) -> dict[str, Any]:
        name, _ = FORMS[self.form]
        # Decay and scale decide the kernel: each form has them or not.
        options = decayed_and_scaled(self.form) if number // 3 % 3 else {}
        options["skip_nonfinite"] = bool(rng.random() < 0.5)
        options["use_locking"] = bool(rng.random() < 0.2)
        arguments = BY_NAME[name].arguments
        is_16_bit = self._dtype in (np.float16, arrays.BF16)
        if rng.random() < 0.3 and is_16_bit and "state_dtype" in arguments:
            options["state_dtype"] = np.float32
        if rng.random() < 0.2 and "clipvalue" in arguments:
            options[pick(rng, ("clipvalue", "clipnorm"))] = float(rng.uniform(0.2, 2.0))
        if "sparse_update" in arguments and self.form != "Adam-lazy":
            options["sparse_update"] = pick(rng, ("lazy", "dense_equivalent"))
        if self.form not in OWN_RATE + FIXED_RATE and rng.random() < 0.6:
            options["learning_rate"] = pick(
                rng, (0.02, [0.01 * k for k in range(1, 12)], np.linspace(0.1, 0.01, 50), halving)
            )
        if name == "AdaFactor" and "learning_rate" in options:
            del options["learning_rate"]
        return options

    def _random_groups(self, rng: np.random.Generator) -> list[tuple[list[int], dict[str, Any]]]:
        """Places of the parameters and the options of each group."""
        places = rng.permutation(len(self._data)).tolist()
        cut = int(rng.integers(len(places) + 1))
        groups = []
        for part in (places[:cut], places[cut:]):
            own: dict[str, Any] = {}
            if "weight_decay" in self._options:
                own["weight_decay"] = float(rng.uniform(0.01, 0.2))
            if rng.random() < 0.5 and self.form not in FIXED_RATE:
                own["lr"] = float(rng.uniform(0.01, 0.1))
            if rng.random() < 0.3:
                own["grad_centralization"] = True
            if part:
                groups.append((part, own))
        return groups

    def _built(self) -> Any:
        """A new optimizer on the arrays."""
        params = [nn.Parameter(w, n) for w, n in zip(self._data, self._names, strict=True)]
        given: list[Any] = params
        if self._groups is not None:
            given = [{"params": [params[i] for i in of], **own} for of, own in self._groups]
            given.append({"order_params": params})
        return table.make(self.form, given, **self._options)

    def _now(self) -> Any:
        """The optimizer: the one that is kept, or a new one in the same state."""
        if self._kept:
            return self._opt
        opt = self._built()
        for name, value in self._assigned.items():
            setattr(opt, name, value)
        for name, array in opt.state_arrays().items():
            array[...] = self._state[name]
        return opt

    # What can happen to it

    def step(self, rng: np.random.Generator) -> Call:
        """A step, or one that fails or is skipped."""
        gradients, kind = self._gradients(rng)
        opt = self._now()
        before = _copied(opt.state_arrays())
        shapes = [(w.shape, str(w.dtype), k) for w, k in zip(self._data, self._kinds, strict=True)]
        text = f"{self.form} {shapes} {self._options} {self._groups} step "
        text = re.sub(r" at 0x\w+", "", f"{text}{int(opt.global_step[0])} {kind}")

        def run() -> Any:
            if kind == "read-only":
                self._data[0].flags.writeable = False
            try:
                opt(gradients)
            except BaseException:
                self._after(opt, before)
                raise
            finally:
                if kind == "read-only":
                    self._data[0].flags.writeable = True
            self._after(opt, opt.state_arrays())
            return self.digested(opt)

        check = None if kind else self._check(opt, gradients, before)
        return Call(text, run, [*self._data, *_flat(gradients)], check)

    def _after(self, opt: Any, state: dict[str, np.ndarray]) -> None:
        self._state = _copied(state)
        self._skipped = inner(opt).skipped_steps + (0 if self._kept else self._skipped)

    def digested(self, opt: Any) -> list[Any]:
        """All that must be equal whether it is kept or made anew."""
        states = opt.state_arrays()
        found = [states[name] for name in sorted(states)]
        return [sorted(states), *found, self._skipped, *self._old]

    def _gradients(self, rng: np.random.Generator) -> tuple[Any, str]:
        self._of_gradients.forget()
        if rng.random() < 0.3:
            self._kinds = pick(rng, self._patterns)
        found = [self._gradient(rng, w, k) for w, k in zip(self._data, self._kinds, strict=True)]
        if rng.random() > 0.15:
            return tuple(found), ""
        return self._spoiled(rng, found)

    def _kind(self, rng: np.random.Generator, w: np.ndarray) -> str:
        takes_rows = w.ndim > 0 and "sparse_update" in BY_NAME[FORMS[self.form][0]].arguments
        kinds = ["dense"] * 6 + ["none"] * 3 + ["other"] * self._mixes
        return str(pick(rng, kinds + (["rows"] * 4 + ["list"]) * takes_rows))

    def _gradient(self, rng: np.random.Generator, w: np.ndarray, kind: str) -> Any:
        memory = self._of_gradients
        if kind == "none":
            return None
        if kind in ("dense", "other"):
            return memory.normal(rng, w.shape, OTHER[w.dtype] if kind == "other" else w.dtype)
        width = arrays.n_elements(w.shape[1:])

        def rows() -> nn.RowTensor:
            return memory.rows(rng, w.shape, w.dtype, arrays.size(rng, 30_000 // max(1, width)))

        return rows() if kind == "rows" else [rows(), rows()]

    def _spoiled(self, rng: np.random.Generator, found: list[Any]) -> tuple[Any, str]:
        """Gradients with which a step must fail, or be skipped; as they are where none can."""
        i = int(rng.integers(len(found)))
        g, w = found[i], self._data[i]
        of_kind = _FAULTS_OF_ROWS if isinstance(g, nn.RowTensor) else _FAULTS_OF_ARRAYS
        fault = pick(rng, _FAULTS if rng.random() < 0.3 else of_kind)
        if fault == "length":
            return tuple(found[1:]), fault
        if fault == "read-only" and not self._was_pickled:
            return tuple(found), fault
        if isinstance(g, nn.RowTensor) and fault == "dense_shape":
            g.dense_shape = (g.dense_shape[0] + 1, *g.dense_shape[1:])
        elif isinstance(g, nn.RowTensor) and fault == "index" and len(g.indices):
            g.indices[-1] = len(w)
        elif isinstance(g, np.ndarray) and fault == "shape":
            found[i] = g[None]
        elif isinstance(g, np.ndarray) and fault == "dtype":
            found[i] = g.astype(np.int64)
        elif isinstance(g, np.ndarray) and fault == "shared" and g.dtype == w.dtype:
            found[i] = w
        elif isinstance(g, np.ndarray) and fault == "not finite" and self._skips and g.size:
            g.reshape(-1)[-1] = np.nan
        else:
            return tuple(found), ""
        return tuple(found), fault

    @property
    def _skips(self) -> bool:
        return bool(self._assigned.get("skip_nonfinite", self._options["skip_nonfinite"]))

    def change(self, rng: np.random.Generator) -> Call:
        """Something between two steps that must count from the next one on."""
        changes = (self._rebind, self._copy, self._pickle, self._load, self._snap, self._rate)
        change = pick(rng, (*changes, self._assign, self._assign))
        text = f"{self.form} {change.__name__}"
        change(rng)
        return Call(text, lambda: None, list(self._data))

    def _rebind(self, rng: np.random.Generator) -> None:
        i = int(rng.integers(len(self._data)))
        old = self._data[i]
        self._data[i] = np.asarray(old * 0.5).astype(old.dtype)
        if self._kept:
            self._opt.parameters[i].data = self._data[i]
        self._leave([old])

    def _leave(self, old: list[np.ndarray]) -> None:
        """What was a parameter is none any more: nothing may be written there."""
        for array in old:
            array[...] = 7
        self._old = old

    def _copy(self, _rng: np.random.Generator) -> None:
        self._become(copy.deepcopy)

    def _pickle(self, _rng: np.random.Generator) -> None:
        self._was_pickled = True  # and lies in bytes, which could not be made writable again
        self._become(lambda opt: pickle.loads(pickle.dumps(opt)))

    def _become(self, copied: Callable[[Any], Any]) -> None:
        old = self._data
        if self._kept:
            self._opt = copied(self._opt)
            self._data = [p.data for p in self._opt.parameters]
        else:
            self._data = [w.copy() for w in old]
        self._leave(old)

    def _snap(self, _rng: np.random.Generator) -> None:
        self._snapshot = self._now().state_dict()

    def _load(self, _rng: np.random.Generator) -> None:
        opt = self._now()
        opt.load_state_dict(self._snapshot)
        self._state = _copied(opt.state_arrays())

    def _rate(self, rng: np.random.Generator) -> None:
        """An entry of a list of learning rates, or the one there is."""
        opt = self._now()
        rate = opt.get_lr_parameter(opt.parameters[int(rng.integers(len(opt.parameters)))])
        if not isinstance(rate, nn.Parameter):
            return
        factor = float(rng.uniform(0.5, 1.0))
        if rng.random() < 0.5:
            rate.data[...] *= factor
        else:
            rate.data = np.asarray(rate.data * factor)
        self._state = _copied(opt.state_arrays())

    def _assign(self, rng: np.random.Generator) -> None:
        opt = self._now()
        known: dict[str, Callable[[], Any]] = {
            "eps": lambda: float(rng.uniform(1e-3, 0.1)),
            "epsilon": lambda: float(rng.uniform(1e-3, 0.1)),
            "coefficient": lambda: float(rng.uniform(0.01, 0.2)),
            "l1": lambda: float(rng.uniform(0.01, 0.2)),
            "clip_threshold": lambda: float(rng.uniform(0.1, 1.0)),
            "skip_nonfinite": lambda: not self._skips,
        }
        if self.form.startswith(("AdaFactor", "LARS-AdaFactor")):
            del known["eps"]
        if "loss_scale" in self._options:
            known["loss_scale"] = lambda: float(rng.uniform(2.0, 5.0))
        names = [name for name in known if hasattr(opt, name)]
        if names:
            name = pick(rng, names)
            self._assigned[name] = known[name]()
            if self._kept:
                setattr(opt, name, self._assigned[name])

    def drop(self) -> None:
        """Nothing refers to it any more."""
        self._opt = None
        gc.collect(0)

    # The reference

    def _check(self, opt: Any, gradients: Any, before: dict[str, np.ndarray]) -> Any:
        """Dense float32 and float64 parameters without a prologue of their own, or None."""
        has_reference = ALL_FORMS[self.form].reference not in ("", *_CANCELLING)
        if not has_reference or self._groups is not None or self._options.get("weight_decay"):
            return None
        if self._options.keys() & {"clipvalue", "clipnorm"}:
            return None
        step = int(before["global_step"][0])
        try:
            rates, scale = opt._rates_at(step), float(opt.loss_scale)
        except RuntimeError:  # the list is used up, as the step will say
            return None
        plain = [
            i
            for i, (w, g) in enumerate(zip(self._data, gradients, strict=True))
            if isinstance(g, np.ndarray) and w.dtype in (F32, F64)
        ]

        def check(arrays_before: list[np.ndarray]) -> None:
            for i in plain:
                w, old = self._data[i], arrays_before[i]
                t = int(before[f"step.{self._names[i]}"][0]) + 1
                names = [opt._state_name(role, self._names[i]) for role in opt._states]
                states = [before[name] for name in names]
                real = np.float64 if w.dtype == F64 else np.float32
                formula = exact_step(self.form, opt, rates[i], t, real)
                expected = formula(old, reference.wide(gradients[i]) / scale, *states)
                after = [w, *(opt.state_arrays()[name] for name in names)]
                for found, exact in zip(after, expected, strict=False):
                    rough = found.dtype not in (F32, F64) or gradients[i].dtype != w.dtype
                    tolerance = 1e-2 if rough else 1e-11 if w.dtype == F64 else 2e-5
                    assert_near(found, exact, tolerance, self.form)

        return check


def _copied(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in state.items()}


def _flat(values: Any) -> list[np.ndarray]:
    """The arrays in nested lists, tuples and RowTensors."""
    if isinstance(values, np.ndarray):
        return [values]
    if isinstance(values, nn.RowTensor):
        return [values.indices, values.values]
    if isinstance(values, list | tuple):
        return [array for value in values for array in _flat(value)]
    return []
