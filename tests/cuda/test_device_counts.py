"""Counts of a run of PyTorch on a device: loaded, stepped and saved, and what that asks of it."""

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from devices import COMPUTES, GPU, KIND, MARKS, STUB, only

pytestmark = [*MARKS, only(STUB, GPU, reason="the simulator has no tensors of PyTorch")]
MANY = 150
FLAGS = [{"fused": True}, {"capturable": True}, {"fused": None, "capturable": False}]
# These read no memory of a device, and enqueue nothing.
FREE = {
    "__get__", "_is_zerotensor", "data_ptr", "dim", "element_size", "is_complex", "is_conj",
    "is_contiguous", "is_floating_point", "is_inference", "is_neg", "numel", "permute", "reshape",
    "storage_offset", "stride", "unbind", "untyped_storage", "view",
}  # fmt: skip


def parameters(torch: Any, n: int = MANY) -> list[Any]:
    made = [torch.nn.Parameter(torch.ones(3, 2, device="cuda")) for _ in range(n)]
    for p in made:
        p.grad = torch.ones(3, 2, device="cuda")
    return made


def file_of(torch: Any, counts: list[Any], **options: Any) -> dict[str, Any]:
    """A state dict of PyTorch's AdamW, of a run on the device with counts of any kind."""
    group = torch.optim.AdamW([torch.zeros(1) for _ in counts]).state_dict()["param_groups"][0]
    states = {
        k: {"step": count} | {name: torch.ones(3, 2, device="cuda") for name in MOMENTS}
        for k, count in enumerate(counts)
    }
    return {"state": states, "param_groups": [{**group, **options}]}


MOMENTS = "exp_avg", "exp_avg_sq"


def traffic(torch: Any) -> Any:
    """A context with all that PyTorch is asked of tensors on a device, or to move."""
    from torch.overrides import TorchFunctionMode

    class Traffic(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def __torch_function__(self, function, _, args=(), kwargs=None) -> Any:
            given = [*args, *(args[0] if args and isinstance(args[0], list | tuple) else ())]
            is_there = any(isinstance(x, torch.Tensor) and x.is_cuda for x in given)
            found = function(*args, **(kwargs or {}))
            name = function.__name__
            if name == "to":
                is_there = moves(*args, *(kwargs or {}).values())
            if is_there and name not in FREE:
                self.found.append(name)
            return found

    return Traffic()


def moves(tensor: Any, *given: Any) -> bool:
    """Whether a tensor goes to the host, or to a device on which it is not."""
    import watch

    to = {str(x).partition(":")[0] for x in given} & {"cpu", "cuda"}
    is_there = tensor.is_cuda if KIND == GPU else watch.is_there(tensor.data_ptr())
    return (to == {"cuda"} and not is_there) or (to == {"cpu"} and tensor.is_cuda)


def places(torch: Any, value: Any) -> Any:
    """All of a state dict, with place, type, shape and numbers for each tensor."""
    if isinstance(value, dict):
        return {name: places(torch, x) for name, x in value.items()}
    if isinstance(value, list):
        return [places(torch, x) for x in value]
    if isinstance(value, torch.Tensor):
        return value.device, value.dtype, value.shape, value.tolist()
    return value


@pytest.mark.parametrize("flags", FLAGS[:2], ids=str)
def test_one_transfer_and_no_wait(torch: Any, flags: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One transfer when they are loaded and when they are saved; one launch a step."""
    import watch
    from fusestep.nn import torch as fused

    counts = [torch.tensor(float(k % 7), device="cuda") for k in range(MANY)]
    if "capturable" in flags:
        rates = {name: torch.tensor(0.5, device="cuda") for name in ("lr", "initial_lr")}
        flags = {**flags, **rates}
    file = file_of(torch, counts, **flags)
    before, optimizer = places(torch, file), fused.AdamW(parameters(torch))
    with traffic(torch) as load:
        optimizer.load_state_dict(file)
    assert load.found == ["stack", "to"]
    waits: list[str] = []
    monkeypatch.setattr(watch.order, "wait_for_all", lambda: waits.append("for all"))
    for k in range(4):
        n_launched = len(watch.launched)
        with traffic(torch) as step:
            optimizer.step()
        loops = [name for name in watch.launched[n_launched:] if "Memcpy" not in name]
        assert (step.found, waits) == ([], [])
        assert len(loops) == 1 or KIND == GPU, k
    with traffic(torch) as save:
        saved = optimizer.state_dict()
    assert save.found == ["to"]
    assert places(torch, file) == before
    for k in range(MANY):
        assert saved["state"][k]["step"].tolist() == k % 7 + 4
        saved["state"][k]["step"] = counts[k]
    expected = {**saved["param_groups"][0], **file["param_groups"][0]}
    assert places(torch, saved["param_groups"]) == places(torch, [expected])
    if not COMPUTES:
        assert places(torch, saved["state"]) == before["state"]


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "ASGD", "Adagrad", "SparseAdam"])
def test_a_run_on_the_device_goes_on(torch: Any, name: str) -> None:
    """All single numbers are those of a run that was not interrupted."""
    from fusestep.nn import torch as fused

    kind, found = getattr(fused, name), []
    for resumes in (False, True):
        optimizer = kind(parameters(torch, 3), lr=0.5)
        for p in optimizer.param_groups[0]["params"] if name == "SparseAdam" else ():
            p.grad = p.grad.to_sparse(1)
        for k in range(5):
            optimizer.step()
            if resumes and k == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = kind(optimizer.param_groups[0]["params"], lr=0.1)
                optimizer.load_state_dict(saved)
        states = optimizer.state_dict()["state"].values()
        numbers = [{n: x for n, x in s.items() if not getattr(x, "shape", ())} for s in states]
        found.append(places(torch, numbers))
    assert found[0] == found[1]
    assert len(found[0]) == 3 and all("step" in own for own in found[0])


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence(torch: Any, seed: int) -> None:
    """Counts, their places and flags beside a list of numbers that follows each call."""
    from fusestep.nn import torch as fused

    rng, n = np.random.default_rng(seed), 4
    optimizer = fused.AdamW(parameters(torch, n))
    expected: list[Any] = [None] * n  # the count of each parameter, and whether it is there
    flags = dict(FLAGS[2])
    for _ in range(40):
        call, owners = rng.choice(CALLS), optimizer.param_groups[0]["params"]
        if call == "load":
            flags, kind = dict(rng.choice(FLAGS)), rng.choice(["there", "here", "number", "double"])
            values = rng.integers(0, 1000, n).tolist()
            made, other = ([of_kind(torch, kind, value) for value in values] for _ in range(2))
            given = file_of(torch, made, **flags)
            if rng.integers(2):  # some had no state
                del given["state"][0]
            hook = optimizer.register_load_state_dict_pre_hook(
                lambda _, own, other=other: own["state"][1].update(step=other[0])
            )
            optimizer.load_state_dict(given)
            hook.remove()
            values[1] = values[0]
            # PyTorch makes tensors of numbers, where it would have them.
            is_there = kind in ("there", "double") or (kind == "number" and any(flags.values()))
            expected = [(value, is_there) for value in values]
            if 0 not in given["state"]:
                expected[0] = None
        elif call == "step":
            rests = int(rng.integers(n + 1))
            for k, p in enumerate(owners):
                p.grad = None if k == rests else torch.ones(3, 2, device="cuda")
            optimizer.step()
            for k, own in enumerate(expected):
                if k != rests:
                    expected[k] = (1, False) if own is None else (own[0] + 1, own[1])
                    assert not optimizer.state[owners[k]]["step"].is_cuda
        elif call == "by hand":
            k, is_there = int(rng.integers(n)), bool(rng.integers(2))
            if expected[k] is not None:
                made = of_kind(torch, "there" if is_there else "here", 9)
                optimizer.state[owners[k]]["step"], expected[k] = made, (9, is_there)
        # Of what stands in for numbers of a device, copies lie on the host.
        elif not any(s["step"].is_cuda for s in optimizer.state.values()):
            optimizer = COPIES[call](optimizer)
        saved = optimizer.state_dict()
        counts = [saved["state"].get(k, {}).get("step") for k in range(n)]
        assert [c if c is None else (float(c), c.is_cuda) for c in counts] == expected, call
        assert {name: saved["param_groups"][0][name] for name in flags} == flags
        if call == "save":
            optimizer.load_state_dict(saved)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy, "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "save": lambda optimizer: optimizer,
}  # fmt: skip
CALLS = "load", "step", "step", "by hand", *COPIES


def of_kind(torch: Any, kind: str, value: float) -> Any:
    if kind == "number":
        return float(value)
    device = "cpu" if kind == "here" else "cuda"
    dtype = torch.float64 if kind == "double" else torch.float32
    return torch.tensor(float(value), dtype=dtype, device=device)


def test_a_number_on_the_host_is_saved_there(torch: Any) -> None:
    """Where its parameter is, as PyTorch loads it; other counts of the file go to the device."""
    from fusestep.nn import torch as fused

    file = file_of(torch, [torch.tensor(3.0, device="cuda") for _ in range(2)], fused=True)
    file["state"][1] |= {name: torch.tensor(1.0) for name in MOMENTS}
    optimizer = fused.AdamW([*parameters(torch, 1), torch.nn.Parameter(torch.tensor(1.0))])
    optimizer.load_state_dict(file)
    optimizer.param_groups[0]["params"][1].grad = torch.tensor(1.0)
    optimizer.step()
    counts = [state["step"] for state in optimizer.state_dict()["state"].values()]
    assert [(count.is_cuda, float(count)) for count in counts] == [(True, 4.0), (False, 4.0)]


def test_dtypes_and_shapes_stay(torch: Any) -> None:
    """Of each dtype there is one transfer; numbers that float32 cannot hold stay exact."""
    from fusestep.nn import torch as fused

    kinds = [*product((torch.float32, torch.float64, torch.int64), ((), (1,)))]
    counts = [torch.full(shape, 2**24, dtype=kind, device="cuda") for kind, shape in kinds]
    for k, (kind, _) in enumerate(kinds):
        if kind != torch.float32:
            counts[k] = (counts[k] + 1).to("cuda")
    file, optimizer = file_of(torch, counts, fused=True), fused.AdamW(parameters(torch, 6))
    before = places(torch, file["state"])
    with traffic(torch) as load:
        optimizer.load_state_dict(file)
    assert load.found == ["stack", "to"] * 3
    assert places(torch, optimizer.state_dict()["state"]) == before
