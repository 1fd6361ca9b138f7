"""States of nn.torch that functions make, in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import fusestep  # noqa: E402
from fusestep.nn import torch as fused  # noqa: E402

from helpers import more  # noqa: E402
from test_options import mixed  # noqa: E402
from torch_training import EVERY, TABLES, assert_same_bits, everything  # noqa: E402

WHOLE = "Adagrad", "Prodigy"  # states that are made at once, and an estimate of all parameters
SAMPLE = "SGD", "SparseAdam"
MAPPED = [name for name in EVERY if name not in WHOLE]


@pytest.mark.parametrize("name", [n if n in SAMPLE else more(n) for n in MAPPED])
@pytest.mark.parametrize("rounding", ["nearest", "master", more("kahan"), more("stochastic")])
def test_a_run_in_files_has_the_same_bits_and_goes_on(
    name: str, rounding: str, tmp_path: Path
) -> None:
    """With an optimizer made anew between two steps, by the files alone."""
    if name == "Adafactor" and rounding != "nearest":
        pytest.skip("its rule is one on matrices")
    dtype = torch.float32 if rounding == "nearest" else torch.bfloat16
    runs = []
    for folder in (None, tmp_path):
        parameters = [p for p in mixed(dtype) if p.dim() == 2][: None if name in TABLES else 1]
        options: dict[str, Any] = {"lr": 0.1, "rounding": rounding}
        if rounding == "nearest":
            del options["rounding"]
        if name in TABLES:
            options["sparse"] = "touched"
        if name == "SGD":
            options["momentum"] = 0.9
        if name == "SparseAdam":
            parameters = parameters[1:]
        for step in range(4):
            if folder is None and step == 0:
                optimizer = getattr(fused, name)(parameters, **options)
            elif folder is not None and step % 2 == 0:
                optimizer = None
                with fusestep.states_in(fusestep.MappedFiles(folder, fill=True)):
                    optimizer = getattr(fused, name)(parameters, **options)
            optimizer.step()
        runs.append(optimizer)
    plain, mapped = (list(optimizer.state.values()) for optimizer in runs)
    for one, other in zip(plain, mapped, strict=True):
        assert float(other["step"]) == 4.0
        for role, tensor in one.items():
            assert_same_bits(
                [torch.as_tensor(other[role]).float()], [torch.as_tensor(tensor).float()]
            )
    assert_same_bits(
        *([p for group in o.param_groups for p in group["params"]] for o in runs)
    )  # fmt: skip


def test_names_and_lifetimes(tmp_path: Path) -> None:
    """States are made at the first gradient, by the function of the constructor."""
    asked = []

    def note(name: str, shape: Any, dtype: Any, initial: Any) -> Any:
        asked.append(name)
        return fusestep.MappedFiles(tmp_path)(name, shape, dtype, initial)

    w = torch.nn.Parameter(torch.ones(4, 3))
    with fusestep.states_in(note):
        optimizer = fused.AdamW([("table", w)], lr=0.1)
    assert not asked
    w.grad = torch.ones(4, 3)
    optimizer.step()
    assert asked == [
        "step.parameter table",
        "exp_avg.parameter table",
        "exp_avg_sq.parameter table",
    ]
    assert not fused.AdamW([w]).state  # after the context


def test_what_is_loaded_goes_to_the_files(tmp_path: Path) -> None:
    runs = []
    for mapped in (False, True):
        w = torch.nn.Parameter(torch.ones(64, 32, dtype=torch.bfloat16))
        first = fused.AdamW([w], lr=0.1, rounding="master")
        for step in range(4):
            w.grad = torch.full_like(w, step + 1.0)
            if mapped and step == 2:
                with fusestep.states_in(fusestep.MappedFiles(tmp_path, fill=True)):
                    other = fused.AdamW([w], lr=0.1, rounding="master")
                other.load_state_dict(first.state_dict())
                first = other
                del other
            first.step()
        runs.append(everything(first))
    assert_same_bits(*runs)
    del first
    with fusestep.states_in(fusestep.MappedFiles(tmp_path, fill=True)):
        again = fused.AdamW([w], lr=0.1, rounding="master")
    w.grad = torch.zeros_like(w)
    again.step()
    assert again.state[w]["step"] == 5.0


@pytest.mark.parametrize("name", WHOLE)
def test_classes_that_cannot(name: str, tmp_path: Path) -> None:
    maker = fusestep.MappedFiles(tmp_path)
    with fusestep.states_in(maker), pytest.raises(ValueError, match=f"{name}: states_in cannot"):
        getattr(fused, name)(mixed()[:1])
    module = torch.nn.Linear(2, 2)
    with fusestep.states_in(maker), pytest.raises(ValueError, match="states_in cannot make"):
        fused.Thor(module, lr=0.1)


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    files = fusestep.MappedFiles(tmp_path)
    parameters = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    with fusestep.states_in(files):
        optimizer = fused.AdamW(parameters, lr=0.1)
    (tmp_path / "exp_avg.parameter 1.safetensors").write_bytes(b"0" * 100)
    for p in parameters:
        p.grad = torch.ones_like(p)
    before = everything(optimizer)
    with pytest.raises(ValueError, match=r"exp_avg\.parameter 1' is torn or another one"):
        optimizer.step()
    assert all(map(torch.equal, before, everything(optimizer)))
    assert not optimizer.state
