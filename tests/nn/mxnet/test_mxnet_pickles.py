"""Files of states that MXNet wrote: read, converted, gone on from; and what is refused."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusestep import __main__ as command
from fusestep.nn import mxnet as mx
from fusestep.nn.mxnet.pickles import array_of, load_states

FILES = Path(__file__).parents[2] / "recorded" / "data" / "mxnet_states"
ARRAYS = np.load(FILES / "arrays.npz")


def convert(*arguments: str | Path) -> int:
    return command.main(["convert", *map(str, arguments)])


@pytest.mark.parametrize("end", ["", "_with_optimizer"])
@pytest.mark.parametrize(("name", "n_states"), [("adam", 2), ("sgd", 1)])
def test_what_mxnet_wrote_is_read(name: str, n_states: int, end: str) -> None:
    states, counts, updates = load_states((FILES / f"{name}{end}.states").read_bytes())
    assert (counts, updates) == (({0: 3, 1: 3}, 3) if end else ({}, 0))
    for i in range(2):
        for k, array in enumerate(states[i] if n_states > 1 else (states[i],)):
            np.testing.assert_array_equal(array, ARRAYS[f"{name}/s{i}.{k}"])


@pytest.mark.parametrize(
    "more", [["adam.states", "--updates", "3"], ["adam_with_optimizer.states"]]
)
def test_a_training_goes_on(more: list[str], tmp_path: Path) -> None:
    target = tmp_path / "states"
    assert convert(FILES / more[0], target, *more[1:]) == 0
    updater = mx.Updater(mx.Adam(learning_rate=0.1, compat="1.9"))
    updater.set_states(target.read_bytes())
    for i in range(2):
        w = ARRAYS[f"adam/w{i}"].copy()
        updater(i, ARRAYS[f"adam/g{i}"], w)
        np.testing.assert_allclose(w, ARRAYS[f"adam/next{i}"], rtol=1e-6)


def test_the_states_of_a_gluon_trainer(capsys: Any, tmp_path: Path) -> None:
    assert convert(FILES / "gluon_trainer.states", tmp_path / "s") == 0
    assert "states of 2 weights, 4 updates" in capsys.readouterr().out


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


PICKLES = [
    Attack(), {0: Attack()}, ({0: None}, Attack()), print, {0: np.zeros(3)}, {0: "text"}, [], 3,
    ({0: None}, 3), {0: {1: 2}}, {0: b"bytes"},
]  # fmt: skip


@pytest.mark.parametrize("content", PICKLES)
def test_what_else_is_pickled_is_refused(content: Any) -> None:
    for protocol in range(6):
        with pytest.raises(ValueError, match="convert: states cannot be read"):
            load_states(pickle.dumps(content, protocol))


def test_damaged_files_are_refused(tmp_path: Path, capsys: Any) -> None:
    data = (FILES / "adam.states").read_bytes()
    for end in range(len(data)):
        with pytest.raises(ValueError, match="cannot be read"):
            load_states(data[:end])
    rng = np.random.default_rng(0)
    for _ in range(500):  # read, or refused
        changed = bytearray(data)
        changed[rng.integers(len(data))] = rng.integers(256)
        try:
            load_states(bytes(changed))
        except ValueError as error:
            assert "cannot be read" in str(error)  # noqa: PT017
    target = tmp_path / "target"
    for name, content, text in (
        ("a.states", data, "say how many with --updates"),
        ("b.states", data[:50], "cannot be read"),
        ("c.other", data, "expected a name that ends with .ckpt or .states"),
    ):
        (tmp_path / name).write_bytes(content)
        assert convert(tmp_path / name, target) == 1
        assert text in capsys.readouterr().err
    assert convert(tmp_path / "none.states", target) == 1
    assert convert(tmp_path / "none.ckpt", target) == 1
    assert not target.exists()


def test_arrays_of_other_kinds() -> None:
    def raw(magic: int = 0xF993FAC9, kind: int = 0, code: int = 1, size: int = 16) -> bytes:
        return struct.pack("<Iii2qiii", magic, kind, 2, 2, 1, 1, 0, code) + bytes(size)

    assert array_of(raw()).tolist() == [[0.0], [0.0]]
    for changed in ({"magic": 1}, {"kind": 1}, {"code": 9}, {"size": 15}):
        with pytest.raises(ValueError, match="an array"):
            array_of(raw(**changed))
