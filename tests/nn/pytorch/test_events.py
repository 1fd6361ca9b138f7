"""Random sequences of what can happen in a training, ours beside PyTorch's optimizer."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import Parameter
from fusestep.nn import torch as fused
from helpers import more
from subprocesses import TORCH
from test_numbers import undo_casts
from torch_training import DENSE, assert_close, since

SHAPES = [(3, 4), (5,), (), (2, 3, 2), (4, 3)]
_OF_ADAM = {"decoupled_weight_decay": (False, True)} if TORCH >= (2, 7) else {"eps": (1e-8, 1e-3)}
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "SGD": {"momentum": (0.9, 0.5), "dampening": (0, 0.3), "nesterov": (False,)},
    "Adagrad": {"lr_decay": (0, 0.1), "eps": (1e-10, 1e-4)},
    "RMSprop": {"alpha": (0.99, 0.5), "eps": (1e-8, 1e-3)},
    "Adam": {"betas": ((0.9, 0.999), (0.5, 0.7)), **_OF_ADAM},
    "AdamW": {"betas": ((0.9, 0.999), (0.5, 0.7)), "eps": (1e-8, 1e-3)},
    "NAdam": {"momentum_decay": (4e-3, 0.1), "decoupled_weight_decay": (False, True)},
    "RAdam": {"betas": ((0.9, 0.999), (0.5, 0.7)), "decoupled_weight_decay": (False, True)},
    "Adamax": {"betas": ((0.9, 0.999), (0.5, 0.7)), "eps": (1e-8, 1e-3)},
    "Adadelta": {"rho": (0.9, 0.5), "eps": (1e-6, 1e-3)},
    "ASGD": {"t0": (1e6, 3), "alpha": (0.75, 0.5)},
    "Rprop": {"etas": ((0.5, 1.2), (0.3, 1.5)), "step_sizes": ((1e-6, 50), (1e-3, 0.05))},
    "Adafactor": {"d": (1.0, 2.0), "beta2_decay": (-0.8, -0.5)},
}
_DECAYS = (0.0, 0.1)


class Side:
    """Parameters and their optimizer, of one package; every event happens to both sides."""

    def __init__(self, package: Any, name: str, random_: random.Random) -> None:
        self.package, self.name = package, name
        torch.manual_seed(random_.randrange(1000))
        parameters = [Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
        options = {"momentum": 0.9} if name == "SGD" else {}
        options |= {"amsgrad": True} if name in {"Adam", "AdamW"} and random_.random() < 0.5 else {}
        self.takes_rows = package is fused and name != "Adafactor"
        options |= {"sparse": "all"} if self.takes_rows else {}
        groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.03}]
        self.optimizer = getattr(package, name)(groups, lr=0.01, **options)

    @property
    def parameters(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def tensors(self) -> list[Any]:
        states = [self.optimizer.state.get(p, {}) for p in self.parameters]
        values = [torch.as_tensor(x) for s in states for _, x in sorted(s.items()) if x is not None]
        return [t.detach().double() for t in (*self.parameters, *values)]

    # Events: each takes a source of random choices that is equal on both sides.

    def step(self, r: random.Random) -> None:
        self._gradients(r, left_out=0.1)
        self.optimizer.step()

    def step_of_all(self, r: random.Random) -> None:
        self._gradients(r, left_out=0.0)
        self.optimizer.step()

    def steps_alike(self, r: random.Random) -> None:
        """Gradients of the same kinds, which are looked at by compiled code, and then another."""
        rows = [p for p in self.parameters if p.dim() and r.random() < 0.3]
        for k in range(4):
            self._plain_gradients(r, rows)
            if k == 3:
                p = r.choice(self.parameters)
                p.grad = torch._neg_view(p.grad.to_dense())
            if k > 1 and r.random() < 0.5:
                self.exchange_all_memory(r)
            self.optimizer.step()

    def _plain_gradients(self, r: random.Random, rows: list[Any]) -> None:
        generator = torch.Generator().manual_seed(r.randrange(10**6))
        for p in self.parameters:
            p.grad = torch.empty_like(p).detach().normal_(generator=generator)
            if self.takes_rows and any(p is one for one in rows):
                p.grad = p.grad.to_sparse(1)

    def step_with_closure(self, r: random.Random) -> None:
        def closure() -> int:
            self._gradients(r, left_out=0.2)
            return 3

        assert self.optimizer.step(closure) == 3

    def _gradients(self, r: random.Random, left_out: float) -> None:
        generator = torch.Generator().manual_seed(r.randrange(10**6))
        for p in self.parameters:
            form, is_left_out = r.randrange(10), r.random() < left_out
            g = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            if form == 0:
                g = torch.stack([g, g], -1)[..., 1]
            elif form == 1:
                g = g.flatten()[:1].expand(p.numel()).reshape(p.shape) if p.numel() else g
            elif form == 2:
                is_ours = self.package is fused  # PyTorch's foreach step takes none without memory
                g = torch._efficientzerotensor(g.shape, dtype=g.dtype) if is_ours else g.zero_()
            elif form in (3, 4) and g.dim():
                g = self._rows(g, r)
            elif form == 5:
                g = torch._neg_view(-g)
            elif form == 6:
                g = torch.complex(g, -g).conj().imag
            elif form == 7 and self.package is fused and hasattr(p, "grad_dtype"):
                p.grad_dtype, g = None, g.float()  # the other one takes equal numbers
            elif form == 7:
                g = g.float().double()
            elif form == 8:
                g = Parameter(g)
            p.grad = None if is_left_out else g

    def _rows(self, g: Any, r: random.Random) -> Any:
        """Some of its rows, some of them twice; PyTorch's classes take them as dense ones."""
        rows = torch.tensor([r.randrange(len(g)) for _ in range(r.randrange(6))])
        sparse = torch.sparse_coo_tensor(
            rows.reshape(1, -1).long(), g[rows.long()], g.shape, check_invariants=True
        )
        if g.dim() > 1 and r.random() < 0.3:  # some elements
            sparse = sparse.to_dense().to_sparse(2)
        if sparse.sparse_dim() == 1 and r.random() < 0.3:
            values = torch._neg_view(-sparse._values())
            sparse = torch.sparse_coo_tensor(
                sparse._indices(), values, g.shape, check_invariants=False
            )
        return sparse if self.takes_rows else sparse.to_dense()

    def change_options(self, r: random.Random) -> None:
        group = r.choice(self.optimizer.param_groups)
        key = r.choice(sorted(OPTIONS[self.name]))
        group[key] = r.choice(OPTIONS[self.name][key])

    def change_decay(self, r: random.Random) -> None:
        group, value = r.choice(self.optimizer.param_groups), r.choice(_DECAYS)
        if "weight_decay" in group:
            group["weight_decay"] = value

    def change_direction(self, r: random.Random) -> None:
        r.choice(self.optimizer.param_groups)["maximize"] = r.random() < 0.5

    def change_rate(self, r: random.Random) -> None:
        rate = r.choice((0.0 if self.name != "Rprop" else 0.01, 0.01, 0.1))
        group, is_tensor = r.choice(self.optimizer.param_groups), r.random() < 0.3
        if is_tensor:
            group["lr"] = torch.tensor(rate, dtype=torch.float64)
        else:
            group["lr"] = rate

    def change_options_in_place(self, r: random.Random) -> None:
        """What a group has stays the same object, and is another number."""
        group = r.choice(self.optimizer.param_groups)
        group["lr"] = torch.tensor(0.01, dtype=torch.float64)
        pairs = {k: x for k, x in OPTIONS[self.name].items() if isinstance(x[0], tuple)}
        for key, (value, _) in pairs.items():
            group[key] = list(value)
        for k in range(2):
            self.step_of_all(r)
            group["lr"].fill_((0.02, 0.03)[k])
            for key, values in pairs.items():
                group[key][0] = values[1 - k][0]
        self.step_of_all(r)

    def exchange_groups(self, r: random.Random) -> None:
        """The dictionaries, or one option for another that nobody reads."""
        groups = self.optimizer.param_groups
        if r.random() < 0.5:
            groups[:] = [{**group, "weight_decay": r.choice(_DECAYS)} for group in groups]
        for group in groups:
            group.pop("note", None)
            group[r.choice(("note", "remark"))] = r.random()

    def replace_memory(self, r: random.Random) -> None:
        p = r.choice(self.parameters)
        old, p.data = p.data, self._moved(p.data, r)
        old.fill_(torch.nan)  # nothing may look there any more

    def replace_state(self, r: random.Random) -> None:
        state = self.optimizer.state.get(r.choice(self.parameters), {})
        names, which = (
            sorted(n for n, x in state.items() if isinstance(x, torch.Tensor)), r.random(),
        )  # fmt: skip
        if names:
            name = names[int(which * len(names))]
            old, state[name] = state[name], self._moved(state[name], r)
            old.fill_(torch.nan)

    def _moved(self, tensor: Any, r: random.Random) -> Any:
        """Equal, in other memory, which may be strided or of another order."""
        how, tensor = r.randrange(3), tensor.detach()
        if how == 0:
            return torch.stack([tensor] * 2, -1)[..., 0]
        backwards = tuple(range(tensor.dim()))[::-1]
        return tensor.clone() if how == 1 else tensor.permute(backwards).clone().permute(backwards)

    def forget(self, r: random.Random) -> None:
        """The states of one parameter, or all; PyTorch's Adagrad makes them once."""
        if self.name == "Adagrad":
            return
        if r.random() < 0.3:
            self.optimizer.state.clear()
        else:
            self.optimizer.state.pop(r.choice(self.parameters), None)

    def scale_state(self, r: random.Random) -> None:
        for value in self.optimizer.state.get(r.choice(self.parameters), {}).values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(0.5)

    def exchange(self, r: random.Random) -> None:
        """As in Gaussian splatting: rows are added or removed, with their states or without."""
        group = r.choice(self.optimizer.param_groups)
        k, keeps = r.randrange(len(group["params"])), r.random() < 0.5 or self.name == "Adagrad"
        old, kept = group["params"][k], ...
        if old.dim() and self.name != "Adafactor":  # whose states are of the whole
            kept = [r.randrange(len(old)) for _ in range(r.randrange(1, 7))]
        new = group["params"][k] = Parameter(old.detach()[kept] * 0.5)
        state = self.optimizer.state.pop(old, None)
        if keeps and state:
            self.optimizer.state[new] = {
                role: x[kept] if isinstance(x, torch.Tensor) and x.shape == old.shape else x
                for role, x in state.items()
            }

    def add_group(self, r: random.Random) -> None:
        shape = r.choice(((2, 2), (3,)))
        if len(self.optimizer.param_groups) < 4:
            new = Parameter(torch.full(shape, 0.7, dtype=torch.float64))
            self.optimizer.add_param_group({"params": [new]})

    def merge_groups(self, r: random.Random) -> None:
        first, *_, last = self.optimizer.param_groups
        if first is not last and len(self.optimizer.param_groups) > 2 and r.random() < 0.5:
            first["params"] += last["params"]
            self.optimizer.param_groups.pop()

    def copy(self, r: random.Random) -> None:
        del r
        self.optimizer.zero_grad()
        self.optimizer = copy.deepcopy(self.optimizer)

    def exchange_all_memory(self, r: random.Random) -> None:
        """As parametrizations and sharded training do in every step."""
        del r
        for p in self.parameters:
            p.data = p.data.clone()
            state = self.optimizer.state.get(p, {})
            state.update((k, x.clone()) for k, x in state.items() if isinstance(x, torch.Tensor))

    def change_dtype_of_count(self, r: random.Random) -> None:
        state = self.optimizer.state.get(r.choice(self.parameters), {})
        if "step" in state:
            state["step"] = state["step"].double()

    def freeze(self, r: random.Random) -> None:
        p = r.choice(self.parameters)
        p.requires_grad_(not p.requires_grad)


STEPS = ("step", "step_of_all", "steps_alike", "step_with_closure")
OTHERS = (
    "change_options", "change_options_in_place", "change_decay", "change_direction",
    "change_rate", "exchange_groups", "replace_memory", "replace_state", "scale_state",
    "exchange", "add_group", "merge_groups", "copy", "freeze", "exchange_all_memory",
    "exchange_all_memory", "change_dtype_of_count", "forget")  # fmt: skip


def exchange_state_dicts(mine: Side, other: Side) -> None:
    """States travel in both directions."""
    of_mine, of_other = (copy.deepcopy(side.optimizer.state_dict()) for side in (mine, other))
    mine.optimizer.load_state_dict(of_other)
    other.optimizer.load_state_dict(of_mine)
    undo_casts(other.optimizer)


def play(name: str, seed: int, length: int) -> list[str]:
    """A sequence of events; both sides are equal after each. What happened."""
    chooser = random.Random(f"{name} {seed}")
    start = chooser.randrange(10**6)
    mine = Side(fused, name, random.Random(start))
    other = Side(torch.optim, name, random.Random(start))
    happened = []
    for _ in range(length):
        event = chooser.choice(STEPS if chooser.random() < 0.6 else (*OTHERS, "exchange_dicts"))
        happened.append(event)
        if event == "exchange_dicts":
            exchange_state_dicts(mine, other)
        else:
            source = chooser.randrange(10**6)
            for side in (mine, other):
                act: Callable[[random.Random], None] = getattr(side, event)
                act(random.Random(source))
        assert [len(g["params"]) for g in mine.optimizer.param_groups] == [
            len(g["params"]) for g in other.optimizer.param_groups
        ]
        try:
            # Errors add up: a rate of Adadelta has a condition, Adafactor a root of a mean.
            assert_close(mine.tensors(), other.tensors(), 1e-8)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"{name}, seed {seed}: {happened}") from error
    return happened


@pytest.mark.parametrize(
    ("seed", "length"), [*((k, 60) for k in range(3)), *(more(k, 250) for k in range(100, 110))]
)
# PyTorch's Adagrad made its states once.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=since(2, 13)) if n == "Adagrad" else n for n in DENSE]
)
def test_sequences(name: str, seed: int, length: int) -> None:
    assert set(STEPS) <= set(play(name, seed, length))
