"""The workers of the benchmark: their protocol, and that NumPy's computes what it says."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import reference_elementwise as elementwise
from bench_support import FAKE_WORKER, values_of
from fusestep.bench.measure import ContestantLostError
from fusestep.bench.peer import PEERS, Worker
from fusestep.bench.workers import worker_protocol
from fusestep.bench.workers.worker_protocol import Job

Arrays = list[np.ndarray]
Given = tuple[Any, ...]


class Asked(Worker):
    """A worker process, asked with the usual arguments where none are given."""

    def __init__(self, script: Path | str, threads: int = 2) -> None:
        super().__init__(["-W", "error", str(script)], sys.executable, threads)

    def forms(self, algorithm: str, kind: str, dtype: str = "float32") -> list[str]:
        asked = {"do": "forms", "algorithm": algorithm, "kind": kind, "dtype": dtype}
        return list(self.ask(asked)["forms"])

    def set_up(self, *parameters: Given, **case: Any) -> dict[str, Any]:
        sparse = [one[2] is not None for one in parameters]
        kind = "dense" if not any(sparse) else "rows" if sparse == [True] else "mixed"
        usual = {"dtype": "float32", "copies": 1, "fresh": False, "warm_up": 3}
        return self.ask({"do": "setup", "kind": kind, **usual, **case, "parameters": parameters})

    def sample(self, form: str, scenario: str = "loop") -> float:
        return float(self.ask({"do": "sample", "form": form, "scenario": scenario})["seconds"][0])

    def memory(self, form: str) -> int | None:
        found: int | None = self.ask({"do": "memory", "form": form})["bytes"]
        return found


# -- the protocol, with a made-up library ---------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Asked]:
    script = tmp_path / "fake_worker.py"
    script.write_text(FAKE_WORKER, encoding="utf-8")
    with contextlib.closing(Asked(script)) as worker:
        yield worker


def given(
    gradient: np.ndarray, indices: np.ndarray | None = None, start: np.ndarray | None = None
) -> Given:
    """A parameter as a set-up request describes it."""
    shape = (gradient if start is None else start).shape
    return shape, gradient, indices, 0.0 if start is None else start, None


ONES = given(np.ones((2, 3), np.float32))


SMALL = {"algorithm": "small", "form": "small dense float32"}
FORM = SMALL["form"]


@pytest.mark.parametrize(("warm_up", "steps"), [(0, 0), (2, 2), (None, 5)])
def test_a_case_from_set_up_to_drop(fake: Asked, warm_up: int | None, steps: int) -> None:
    assert fake.version == "1.2.3"
    assert fake.forms("keeps", "rows", "float16") == ["keeps rows float16"]
    assert fake.set_up(ONES, **SMALL, warm_up=warm_up) == {}
    assert np.all(values_of(fake, FORM)[0] == steps)
    assert fake.sample(FORM) > 0
    (w,) = values_of(fake, FORM)
    assert w.dtype == np.float32
    assert w[0, 0] >= steps + 1 + 1  # with the lead-in
    assert np.all(w == w[0, 0])
    assert (fake.memory(FORM) or 0) >= 0
    assert fake.ask({"do": "drop"}) == {}
    with pytest.raises(ContestantLostError, match="KeyError"):
        fake.sample(FORM)


def test_copies_take_turns(fake: Asked) -> None:
    assert fake.set_up(ONES, copies=3, warm_up=2, **SMALL) == {}
    for scenario in ("loop", "pause20"):
        fake.sample(FORM, scenario)
    (first,) = values_of(fake, FORM)
    assert first[0, 0] >= 2 + 2  # a step of it, and three and three after pauses, are a third


def test_every_failure_is_answered(fake: Asked) -> None:
    """And the worker goes on."""
    failing = {"algorithm": "fails", "form": "fails dense float32"}
    for call, text in (
        (lambda: fake.set_up(ONES, **{**SMALL, "form": "large"}),
         "ValueError: no form 'large' of small, dense, float32"),
        (lambda: fake.set_up(ONES, **failing), "MemoryError: too large"),
        (lambda: fake.ask({"do": "dance"}), "ValueError: no request 'dance'"),
        (lambda: values_of(fake, "never set up"), "KeyError: 'never set up'"),
        (lambda: fake.set_up(ONES[:3], **SMALL), "ValueError: not enough values to unpack"),
    ):  # fmt: skip
        with pytest.raises(ContestantLostError) as error:
            call()
        assert str(error.value).startswith(text)
        assert not fake.is_broken
        assert fake.ask({"do": "hello"}) == {"version": "1.2.3"}


def test_memory_that_nobody_sees(fake: Asked) -> None:
    form = "keeps dense float32"
    assert fake.set_up(ONES, algorithm="keeps", form=form) == {}
    assert fake.memory(form) is None


def test_peak_memory_sees_what_a_step_gives_back() -> None:
    size = 2**25
    assert_about(worker_protocol.peak_memory(Job(lambda: np.ones(size, np.uint8).sum())), size)
    loaded: Arrays = []
    beforehand = Job(lambda: None, lambda: loaded.append(np.ones(size, np.uint8)))
    assert_about(worker_protocol.peak_memory(beforehand), 0)


def assert_about(peak: int | None, size: int) -> None:
    if peak is None:  # the system does not count it
        assert not sys.platform.startswith("linux") or not Path("/proc/self/clear_refs").exists()
    else:
        assert abs(peak - size) < 2**22


# -- NumPy's worker -------------------------------------------------------------------------------

LR, DECAY = 1e-3, 0.01
FORMS = ["blocks", "blocks in threads"]
Step = Callable[..., tuple[Any, ...]]


def adam_scalars(t: int) -> reference.AdamScalars:
    """Epsilon is added to the corrected root, as in the paper's algorithm 1."""
    epsilon = 1e-8 * np.sqrt(1 - 0.999**t)
    return reference.adam_scalars(LR, 0.9, 0.999, epsilon, 0.9**t, 0.999**t, real=np.float64)


def adamw(t: int, w: Any, *rest: Any) -> tuple[Any, ...]:
    return reference.adam(w * (1 - LR * DECAY), *rest, adam_scalars(t))


# The reference of each step, and the number of its states.
DENSE: dict[str, tuple[Step, int]] = {
    "adam": (lambda t, *arrays: reference.adam(*arrays, adam_scalars(t)), 2),
    "adamw": (adamw, 2),
    "sgd": (lambda _, *arrays: elementwise.sgd(*arrays, lr=LR), 0),
    "momentum": (
        lambda _, *arrays: elementwise.momentum(*arrays, lr=LR, momentum=0.9, nesterov=False), 1),
    "adagrad": (lambda _, *arrays: elementwise.adagrad(*arrays, lr=LR), 1),
}  # fmt: skip
ROWS = ("adam-lazy", "adam-rows", "sgd-rows", "momentum-lazy", "adagrad-rows")


def run(name: str, w: np.ndarray, g: np.ndarray, indices: np.ndarray | None = None) -> np.ndarray:
    """Three steps of the reference."""
    step, count = DENSE[name.partition("-")[0]]
    arrays: tuple[Any, ...] = (reference.wide(w), *(np.zeros(w.shape) for _ in range(count)))
    for t in (1, 2, 3):

        def at(w: Any, g: Any, *states: Any, t: int = t) -> tuple[Any, ...]:
            return step(t, w, g, *states)

        w, *states = arrays
        if indices is None:
            arrays = at(w, g, *states)
        elif name == "adam-rows":
            arrays = reference.dense_equivalent_step(at, w, indices, g, *states)
        else:
            arrays = reference.lazy_step(at, w, indices, g, *states)
    new_w: np.ndarray = arrays[0]
    return new_w


@pytest.fixture(scope="module")
def numpy_worker() -> Iterator[Asked]:
    with contextlib.closing(Asked(PEERS["numpy"].program[0])) as worker:
        yield worker


def normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def assert_steps(got: np.ndarray, want: np.ndarray, start: np.ndarray, tolerance: float) -> None:
    """The steps are equal, relative to the largest, but for the rounding of the parameters."""
    assert got.shape == want.shape
    rounding = 4 * np.finfo(np.float32 if tolerance < 1e-3 else np.float16).eps * np.abs(want).max()
    largest = np.abs(want - start).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * largest + rounding)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in DENSE), ("adam", "float16")]
)
def test_dense_steps(numpy_worker: Asked, name: str, dtype: str, form: str) -> None:
    """Three steps on three dense parameters, one of which needs several blocks."""
    assert numpy_worker.forms(name, "dense", dtype) == FORMS
    storage = np.dtype(dtype)
    starts = [0.01 * normal(1, shape) for shape in [(7, 5), (1003,), (3, 110_000)]]
    starts, gradients = (
        [x.astype(storage).astype(np.float32) for x in arrays]
        for arrays in (starts, [normal(2, w.shape) for w in starts])
    )
    parameters = [given(g, start=w) for g, w in zip(gradients, starts, strict=True)]
    assert numpy_worker.set_up(*parameters, algorithm=name, form=form, dtype=dtype) == {}
    tolerance = 1e-5 if dtype == "float32" else 2e-3
    for got, w, g in zip(values_of(numpy_worker, form), starts, gradients, strict=True):
        assert_steps(got, run(name, w, g), w, tolerance)


def row_case() -> tuple[Given, Arrays]:
    """A table whose gradient names rows twice, three times, and not at all."""
    start, g = 0.01 * normal(3, (9, 4)), normal(4, (8, 4))
    indices = np.array([5, 0, 5, 8, 2, 5, 2, 7])
    return given(g, indices, start), [start, g, indices]


def large_case() -> tuple[Given, Arrays]:
    """Rows that are more than a block."""
    start, g = 0.01 * normal(3, (4000, 100)), normal(4, (3000, 100))
    indices = np.random.default_rng(5).integers(0, 4000, 3000)
    return given(g, indices, start), [start, g, indices]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "case"),
    [*((name, row_case) for name in ROWS), *((name, large_case) for name in ROWS[:2])],
)
def test_steps_on_rows(
    numpy_worker: Asked, name: str, case: Callable[[], tuple[Given, Arrays]], form: str
) -> None:
    assert numpy_worker.forms(name, "rows") == numpy_worker.forms(name, "mixed") == FORMS
    table, (start, g, indices) = case()
    w, dense = 0.01 * normal(5, (6,)), normal(6, (6,))
    beside, want = given(dense, start=w), run(name, start, g, indices)
    for parameters in ([table], [table, beside]):
        assert numpy_worker.set_up(*parameters, algorithm=name, form=form) == {}
        got = values_of(numpy_worker, form)
        assert_steps(got[0], want, start, 1e-5)
        if name != "adam-rows":
            absent = np.setdiff1d(np.arange(len(start)), indices)
            np.testing.assert_array_equal(got[0][absent], start[absent])
    assert_steps(got[1], run(name, w, dense), w, 1e-5)


@pytest.mark.parametrize(("name", "kind"), [("adam", "dense"), ("adam-lazy", "rows")])
def test_copies_and_fresh_gradients(numpy_worker: Asked, name: str, kind: str) -> None:
    table, (start, g, indices) = row_case()
    if kind == "dense":
        start, g = start[:8], g
        table = given(g, start=start)
    case = {"algorithm": name, "form": FORMS[0], "copies": 2, "fresh": True}
    assert numpy_worker.set_up(table, **case) == {}
    want = run(name, start, g, None if kind == "dense" else indices)
    (got,) = values_of(numpy_worker, FORMS[0])
    assert_steps(got, want, start, 1e-5)
    assert numpy_worker.sample(FORMS[0], "flush") > 0
    assert (numpy_worker.memory(FORMS[0]) or 0) >= 0


def test_what_numpy_does_not_have(numpy_worker: Asked) -> None:
    for name, kind in [("adam", "rows"), ("adam-lazy", "dense"), ("lamb", "dense")]:
        assert numpy_worker.forms(name, kind) == []
    table, _ = row_case()
    text = "no form 'in place' of adam-lazy, rows, float32"
    with pytest.raises(ContestantLostError, match=text):
        numpy_worker.set_up(table, algorithm="adam-lazy", form="in place")
    with contextlib.closing(Asked(PEERS["numpy"].program[0], threads=1)) as single:
        assert single.forms("adam", "dense") == FORMS[:1]
