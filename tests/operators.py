"""Every operator out of the table of the benchmark: calls of it, and what its arguments take."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from fusestep import ops
from fusestep.bench.cases import operators
from fusestep.bench.registry import Argument

# The variables that are returned, where these are not all.
_RETURNS: Mapping[str, tuple[str, ...]] = {
    "AdamNoUpdateParam": (), "SGD": ("parameters",), "LARSUpdate": (), "adam_update": ("weight",),
}  # fmt: skip
# How a variable is made out of random numbers in (0.1, 1), where not as they are.
_RANGES: Mapping[str, Mapping[str, Callable[[np.ndarray], Any]]] = {
    "SGD": {"stat": np.round},  # some elements take their first step
    "ApplyCenteredRMSProp": {"mean_gradient": lambda x: x / 10},  # a positive variance everywhere
}
# What the arguments beside arrays take, as documented, and values that move a result far. 1e-8 is
# not neutral only beside gradients of its size; an epsilon of 0.1 acts everywhere.
_COMMON: Mapping[str, Argument] = {
    "use_locking": Argument("flag"), "use_nesterov": Argument("flag", True),
    "out_of_range": Argument("out of range"), "beta1_power": Argument("number", 0.5),
    "beta2_power": Argument("at most 1", 0.5), "lr": Argument("number", 0.02),
    "learning_rate": Argument("number", 0.02), "beta1": Argument("number", 0.5),
    "beta2": Argument("number", 0.9), "epsilon": Argument("epsilon", 0.1),
    "decay": Argument("number", 0.5), "momentum": Argument("number", 0.3),
    "l1": Argument("not negative", 0.5), "l2": Argument("not negative", 1.0),
}  # fmt: skip
_OF_FTRL = {"lr": Argument("reciprocal", 0.02), "lr_power": Argument("not positive", -0.3)}
_OF_SPARSE_FTRL = {
    "lr": Argument("reciprocal float", 0.02), "l1": Argument("not negative float", 0.5),
    "l2": Argument("not negative float", 1.0), "lr_power": Argument("not positive float", -0.3),
}  # fmt: skip
_OF_ROW_ADAM = {"beta1_power": Argument("not 1", 0.5)}
_OWN: Mapping[str, Mapping[str, Argument]] = {
    "FusedSparseAdam": _OF_ROW_ADAM,
    "FusedSparseLazyAdam": _OF_ROW_ADAM,
    "ApplyFtrl": _OF_FTRL,
    "FusedSparseFtrl": _OF_SPARSE_FTRL,
    "SparseApplyFtrl": _OF_SPARSE_FTRL,
    "ApplyAdagrad": {"update_slots": Argument("flag", False)},
    "ApplyMomentum": {"gradient_scale": Argument("number", 2.0)},
    "adam_update": {
        "lr": Argument("not negative", 0.02), "beta1": Argument("closed unit", 0.5),
        "beta2": Argument("closed unit", 0.5), "epsilon": Argument("epsilon of MXNet", 0.1),
        "wd": Argument("not negative", 0.5), "rescale_grad": Argument("number", 0.4),
        "clip_gradient": Argument("number", 0.1), "lazy_update": Argument("flag"),
        "compat": Argument("version", "1.9")},
    "SGD": {
        "momentum": Argument("not negative", 0.3), "dampening": Argument("not negative", 0.5),
        "weight_decay": Argument("not negative", 0.3), "nesterov": Argument("flag", True)},
    "LARSUpdate": {
        "epsilon": Argument("not negative float", 0.5),
        "hyperpara": Argument("not negative float", 0.01),
        "use_clip": Argument("flag", True),
        "norm_weight": Argument("not negative", 1.0),
        "norm_gradient": Argument("not negative", 1.0),
        "weight_decay": Argument("not negative", 0.7),
        # The bound of the local rate; without use_clip it has no part in the formula.
        "learning_rate": Argument("not negative", 1e-5, {"use_clip": True})},
}  # fmt: skip


class Operator(operators.Operator):
    """One with all that a valid call needs."""

    def __str__(self) -> str:
        return self.name

    def known(self, name: str) -> Argument:
        """What is documented of an argument of a call or of the constructor."""
        return {**_COMMON, **_OWN.get(self.name, {}), **self._arrays}[name]

    @property
    def _arrays(self) -> dict[str, Argument]:
        if not self.written:
            return {"weight": Argument("array"), "gradient": Argument("gradient")}
        first, *others = self.variables
        found = {first: "variable", **dict.fromkeys(others, "second variable")}
        found |= {self.gradient: "gradient", "indices": "indices"}
        return {name: Argument(takes) for name, takes in found.items()}

    @property
    def constructor(self) -> tuple[str, ...]:
        """Names of the arguments of the constructor."""
        return tuple(n for n in inspect.signature(self.make).parameters if n != "unknown")

    @property
    def returned(self) -> tuple[str, ...]:
        """Names of the variables that are returned."""
        return _RETURNS.get(self.name, self.variables)

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the variables that are updated."""
        return () if self.name == "LARSUpdate" else self.variables

    @property
    def ranges(self) -> Mapping[str, Callable[[np.ndarray], Any]]:
        """How variables are made out of random numbers."""
        return _RANGES.get(self.name, {})

    def inputs(self, shape: tuple[int, ...] = (5, 3), dtype: Any = np.float32) -> dict[str, Any]:
        """Fresh arguments of one valid call, by name and in order."""
        rng = np.random.default_rng(7)
        given: dict[str, Any] = {**self.scalars}
        for name in self.variables:
            values = rng.uniform(0.1, 1.0, shape)
            given[name] = np.asarray(self.ranges.get(name, np.asarray)(values)).astype(dtype)
        if self.takes_rows:
            given[self.gradient] = rng.standard_normal((4, *shape[1:])).astype(dtype)
            given["indices"] = np.array([1, 0, 1, 3])
        else:
            given[self.gradient] = np.asarray(rng.standard_normal(shape)).astype(dtype)
        return {name: given[name] for name in self.arguments}

    def new(self, **constructor: Any) -> Any:
        """An instance; what is not given has the value of `attributes` or its default."""
        return self.make(**{**self.attributes, **constructor})

    def call(self, inputs: dict[str, Any], **constructor: Any) -> Any:
        """The result of one call of a new instance."""
        return self.new(**constructor)(*inputs.values())

    def call_with(self, inputs: dict[str, Any], **others: Any) -> Any:
        """The result of a call with some other arguments, of the constructor too."""
        made = {name: value for name, value in others.items() if name in self.constructor}
        given = {name: value for name, value in others.items() if name not in made}
        return self.call({**inputs, **given}, **made)


class Update(Operator):
    """The function `adam_update` in place, with options for a constructor."""

    @property
    def constructor(self) -> tuple[str, ...]:
        """Names of its options."""
        return "lazy_update", "compat", "use_locking"

    def new(self, **constructor: Any) -> Any:
        """The function of all arguments by their place."""

        def update(w: Any, grad: Any, mean: Any, var: Any, *scalars: Any) -> Any:
            named = dict(zip(self.scalars, scalars, strict=True))
            return ops.adam_update(w, grad, mean, var, w, **named, **constructor)

        return update


OPERATORS = {name: Operator(**vars(op)) for name, op in operators.OPERATORS.items()}
# It updates nothing: `weight` is only read, so it is in no table of operators that write.
LARS_UPDATE = Operator(**vars(operators.LARS_UPDATE))
ROW_OPERATORS = {name: op for name, op in OPERATORS.items() if op.takes_rows}
DENSE_OPERATORS = {name: op for name, op in OPERATORS.items() if not op.takes_rows}
EVERY_OPERATOR = {**OPERATORS, LARS_UPDATE.name: LARS_UPDATE}
ADAM_UPDATE = Update(
    ops.adam_update,
    ("weight", "mean", "var"),
    {
        "lr": 0.1, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "wd": 0.25, "rescale_grad": 0.5,
        "clip_gradient": 0.4},
    None,
    (
        *("weight", "grad", "mean", "var", "lr", "beta1", "beta2", "epsilon"),
        *("wd", "rescale_grad", "clip_gradient")))  # fmt: skip
