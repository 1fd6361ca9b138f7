"""States as bytes: what MXNet wrote, what we write, and what is refused."""

import copy
import json
import pickle
import struct
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load, save
from fusestep.nn import mxnet as mx
from fusestep.nn.mxnet.states import _array
from helpers import arrays_of, assert_same_arrays, assert_same_bits, refused, unchanged
from mxnet_options import F16, F64, KINDS, counts_of, ones, random, rows

FILES = Path(__file__).parents[2] / "recorded" / "data" / "mxnet_states"
ARRAYS = np.load(FILES / "arrays.npz")
EACH_KIND = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


# Files of MXNet

# Each file, its arrays for an index, and the updates that it counts.
WRITTEN = {
    "adam": (2, 0), "adam_with_optimizer": (2, 3), "sgd": (1, 0), "sgd_with_optimizer": (1, 3),
    "gluon_trainer": (2, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_mxnet_wrote(name: str) -> None:
    """Where the file counts nothing, the optimizer says how many updates there were."""
    n_states, updates = WRITTEN[name]
    data, optimizer = (FILES / f"{name}.states").read_bytes(), name.partition("_")[0]
    updater = mx.Updater(mx.Optimizer(begin_num_update=7))
    updater.set_states(data)
    found = updater.states
    assert type(updater.optimizer) is mx.Optimizer  # though one of MXNet is in some of the files
    assert counts_of(updater.optimizer) == (
        (updates, {0: updates, 1: updates}) if updates else (7, {})
    )
    if optimizer != "gluon":
        for i in range(2):
            for k, array in enumerate(arrays_of([found[i]])):
                assert_same_bits(array, ARRAYS[f"{optimizer}/s{i}.{k}"])
                array += 1  # writable, and of its own
    assert [len(arrays_of([state])) for state in found.values()] == [n_states] * 2
    opt = mx.Adam()
    if not updates:
        text = "^set_states: states have no counts of updates: expected .* begin_num_update"
        with pytest.raises(
            (ValueError, TypeError), match=text if n_states == 2 else "a wrong type"
        ):
            mx.Updater(opt).set_states(data)
    assert counts_of(opt) == (0, {})


@pytest.mark.parametrize(("name", "begin"), [("adam", 3), ("adam_with_optimizer", 0)])
def test_a_training_of_mxnet_goes_on(name: str, begin: int) -> None:
    updater = mx.Updater(mx.Adam(learning_rate=0.1, compat="1.9", begin_num_update=begin))
    updater.set_states((FILES / f"{name}.states").read_bytes())
    for i in range(2):
        w = ARRAYS[f"adam/w{i}"].copy()
        updater(i, ARRAYS[f"adam/g{i}"], w)
        np.testing.assert_allclose(w, ARRAYS[f"adam/next{i}"], rtol=1e-6)


# What we write


def new(make: Callable[..., Any], **options: Any) -> mx.Updater:
    """An Updater at the start of a training with everything."""
    schedule = mx.lr_scheduler.MultiFactorScheduler([2, 4, 5], 0.5, 0.1, 2, 0.01)
    opt = make(lr_scheduler=schedule, wd=0.1, clip_gradient=0.5, multi_precision=True,
               param_idx2name={0: "a", 2: "c"}, begin_num_update=1, **options)  # fmt: skip
    opt.set_lr_mult({"a": 0.5, 1: 2.0})
    opt.set_wd_mult({"c": 0.0})
    return mx.get_updater(opt)


def trained(make: Callable[..., Any], **options: Any) -> tuple[mx.Updater, list[np.ndarray]]:
    """An Updater in the middle of a training with everything, and the weights."""
    updater = new(make, **options)
    weights = [random(4, 3), random(5, dtype=F16), random(3, dtype=F64)]
    train(updater, weights, 0)
    return updater, weights


def train(updater: mx.Updater, weights: list[np.ndarray], seed: int) -> None:
    for k in range(seed, seed + 3):
        grads: list[Any] = [random(*w.shape, seed=k, dtype=w.dtype) for w in weights]
        grads[0] = rows([k % 4, 2])
        updater([0, 1, "c"], grads, weights)
        updater(1, grads[1], weights[1])


@pytest.mark.parametrize("how", ["states", "dumped", "deepcopy", "pickle"])
@EACH_KIND
def test_states_go_on(make: Any, how: str) -> None:
    updater, weights = trained(make)
    other = copy.deepcopy(updater) if how == "deepcopy" else pickle.loads(pickle.dumps(updater))
    if how in ("states", "dumped"):
        other = new(make)  # of another program, with an optimizer and a scheduler of its own
        kept = updater.get_states(dump_optimizer=how == "dumped")
        with pytest.raises(TypeError, match=r"^get_states: dump_optimizer has a wrong type"):
            updater.get_states("yes")  # type: ignore[arg-type]
        assert kept == updater.get_states()
        for _ in range(2):
            other.set_states(kept)
            for array in arrays_of([other.states]):
                array += 1  # writable, and of its own
        other.set_states(kept)
    assert counts_of(other.optimizer) == counts_of(updater.optimizer) == (7, {0: 4, 1: 7, "c": 4})
    copies = copy.deepcopy(weights)
    train(updater, weights, 3)
    with unchanged(weights, updater.states):
        train(other, copies, 3)
    assert_same_arrays(copies, weights)
    other.optimizer.set_lr_mult({})
    other.optimizer.lr_scheduler.base_lr = 9.0
    assert updater.optimizer.lr_mult == {"a": 0.5, 1: 2.0}
    assert updater.optimizer.lr_scheduler.base_lr == 0.1


def test_states_of_any_nesting() -> None:
    arrays = [random(2, 3), random(2, dtype=F16), np.array(2.0), np.zeros((0, 3), np.int64),
              np.arange(3).astype(ml_dtypes.bfloat16), np.asfortranarray(random(2, 3))]  # fmt: skip
    first, second = (mx.get_updater(mx.Optimizer()) for _ in "ab")
    first.states = {0: [(arrays[0], None), [3, 0.5, "x", True], ()], "b": None, -5: arrays[1:]}
    second.set_states(first.get_states())
    assert second.states[0][1:] == [[3, 0.5, "x", True], ()]
    assert list(second.states) == [0, "b", -5]
    assert (second.states["b"], second.states[0][0][1]) == (None, None)
    assert_same_arrays(arrays_of([second.states]), arrays)


@pytest.mark.parametrize("state", [
    {"m": ones(2)}, np.float32(1), object(), [ones(2), {1}], namedtuple("State", "m v")(1, 2),
    np.ones(2, complex), np.array(["x"]),
])  # fmt: skip
def test_states_that_cannot_be_written(state: Any) -> None:
    updater = mx.get_updater(mx.Adam())
    updater.states[0] = state
    with pytest.raises(TypeError, match=r"^get_states: state\.0.* cannot be written: expected No"):
        updater.get_states()
    updater.states = {0.5: None}
    with pytest.raises(TypeError, match=r"an index cannot be written: .*int or a str, got 0\.5"):
        updater.get_states()


# What is refused

FORM = "has a wrong type"
BAD_STATES: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, rf"{FORM}: expected \(mean, var\) of create_state, got None"),
    ((None, None), TypeError, "is no array: expected an array, got NoneType"),
    ((ones(3),), TypeError, f"{FORM}: .*got tuple of 1"),
    ([ones(3)] * 3, TypeError, f"{FORM}: .*got list of 3"),
    (ones(2), TypeError, f"{FORM}: .*got ndarray of 2"),
    ((0.5, 1), TypeError, "is no array: .*got float"),
    ((ones(3), ones(3, dtype=int)), TypeError, "has a wrong dtype"),
    ((ones(3), ones(2)), ValueError, r"has arrays that differ in shape: .*got \(2,\)"),
    ((ones(3), ()), TypeError, f"{FORM}: .*got tuple of 0"),
    ((ones(3), (ones(3), None)), TypeError, "is no array: .*got NoneType"),
    ((ones(2), (ones(3), ones(3))), ValueError, "has arrays that differ in shape"),
]


def still(updater: mx.Updater, error: Any, text: str, data: Any) -> None:
    """`data` are refused, and the states, their arrays and the counts are as before."""
    before, opt, counts = updater.states, updater.optimizer, counts_of(updater.optimizer)
    with refused(error, text, before):
        updater.set_states(data)
    assert updater.states is before
    assert (updater.optimizer is opt, counts_of(opt)) == (True, counts)


@EACH_KIND
def test_states_of_another_form(make: Any) -> None:
    updater, other = trained(make)[0], mx.get_updater(make())
    updater.optimizer.idx2name = {2: "d"}
    for state, error, text in BAD_STATES:
        other.states = {1: (ones(1), ones(1)), 2: state}
        still(
            updater, error, f"^{updater.optimizer._name}: state of 'd' {text}", other.get_states()
        )
    updater = mx.Updater(type("Own", (mx.Adam,), {"create_state": lambda *_: None})())
    updater.states = {0: None}  # a class of a user has states of its own
    updater.set_states(updater.get_states())
    assert updater.states == {0: None}


class Attack:
    """An object whose pickle makes a file in the present folder when it is read."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("executed"),)


LOOP: list[Any] = []
LOOP.append(LOOP)
HOSTILE = [
    Attack(), {0: Attack()}, ({0: None}, Attack()), print, {0: np.zeros(3)}, {0: "text"}, [], 3,
    ({0: None}, 3), {0: {1: 2}}, {0: b"bytes"}, {0: LOOP}, {0.5: None}, ({}, {}, {}),
    {0: bytearray},
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_hostile_pickles(protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is executed, nothing has changed."""
    monkeypatch.chdir(tmp_path)
    updater = trained(mx.Adam)[0]
    for content in HOSTILE:
        data = pickle.dumps(content, protocol)
        still(updater, ValueError, "^set_states: states cannot be read: expected those of", data)
    # An array, a number and a class of MXNet where the optimizer should be.
    for last in (b"cmxnet.ndarray\nNDArray\n.", b"K\x01.", b"cmxnet\nA\n)\x81}b."):
        data = b"}" + last[:-1] + b"\x86."
        still(updater, ValueError, "^set_states: states cannot be read", data)
    assert not any(tmp_path.iterdir())


DAMAGES: list[Callable[[dict[str, Any]], Any]] = [
    *(lambda d, key=key: d.pop(key) for key in ("format", "states", "counts", "num_update")),
    *(lambda d, key=key, value=value: d.update({key: value})
      for key in ("format", "states", "counts", "num_update") for value in (None, "x", 1e999, -3)),
    lambda d: d.update(states=[[0, [1]]]),
    lambda d: d.update(states=[[0, "x"]]),
    lambda d: d.update(states=[[None, {"value": 1}]]),
    *(lambda d, t=t: d.update(counts=[[0, t]]) for t in (-1, 1.7, "7", 1e999, True)),
    lambda d: d["states"].append(d["states"][0]),
    lambda d: d["counts"].append([0, 3]),
]  # fmt: skip


def damaged(data: bytes) -> Iterator[bytes]:
    """Bytes of ours that are cut, with other tensors, or with another document."""
    yield data + b"x"
    tensors = load(data)
    for name in tensors:
        yield save({k: v for k, v in tensors.items() if k != name})
    documents = [b"", b"{", b"[]", b"\xff", b"null", b"[" * 200_000 + b"]" * 200_000]
    for damage in DAMAGES:
        document = json.loads(tensors["document"].tobytes())
        damage(document)
        documents.append(json.dumps(document).encode())
    for text in documents:
        yield save({**tensors, "document": np.frombuffer(text, np.uint8)})


def test_damaged_bytes() -> None:
    updater = trained(mx.Adam)[0]
    ours, theirs = updater.get_states(), (FILES / "adam_with_optimizer.states").read_bytes()
    cut = [ours[:n] for n in range(0, len(ours), 97)] + [theirs[:n] for n in range(len(theirs))]
    for data in (*cut, *damaged(ours)):
        still(updater, ValueError, "^set_states: states cannot be read", data)
    for value in (None, "text", {0: ones(2)}, 5):
        still(updater, TypeError, "^set_states: states has a wrong type: expected bytes", value)
    rng = np.random.default_rng(0)
    for _ in range(500):  # read, or refused
        changed = bytearray(theirs)
        changed[rng.integers(len(theirs))] = rng.integers(256)
        try:
            mx.Updater(mx.Optimizer()).set_states(changed)
        except ValueError as error:
            assert "cannot be read" in str(error)  # noqa: PT017


def test_arrays_of_other_kinds() -> None:
    def raw(
        magic: int = 4187224777, kind: int = 0, n: int = 2, code: int = 1, size: int = 16
    ) -> bytes:
        return struct.pack("<Iii2qiii", magic, kind, 2, n, 1, 1, 0, code) + bytes(size)

    assert _array(raw()).tolist() == _array(raw(magic=0xF993FACA)).tolist() == [[0.0], [0.0]]
    for changed in (
        {"magic": 1}, {"kind": 1}, {"code": 9}, {"n": -1}, {"size": 8}, {"size": 15}, {"size": 24},
    ):  # fmt: skip
        with pytest.raises((ValueError, KeyError)):
            _array(raw(**changed))
