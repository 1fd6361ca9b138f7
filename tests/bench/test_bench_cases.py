"""The table of cases: complete, selectable, and every entry of it takes the steps it names."""

import inspect
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from bench_support import EVERY_STEP, SOME_STEPS, TINY, named, point, quiet, use_small_models
from fusestep import nn, ops
from fusestep.bench import run, work
from fusestep.bench.buffers import Buffers
from fusestep.bench.cases import indices, model_shapes, optimizers, workloads
from fusestep.bench.cases import mxnet as mxnet_subjects
from fusestep.bench.cases import steps as cases
from fusestep.bench.cases.options import Request
from fusestep.bench.cases.workloads import parse_sizes
from fusestep.bench.errors import BenchError
from fusestep.bench.peer import Peers
from fusestep.bench.registry import ROWS
from fusestep.bench.report.result import SpecialResult
from helpers import arrays_of, label, sampled

# -- complete -------------------------------------------------------------------------------------


def test_every_operator_and_optimizer_has_a_case() -> None:
    public = {
        f"ops.{name}"
        for name in ops.__all__
        if not (inspect.isclass(getattr(ops, name)) and issubclass(getattr(ops, name), Exception))
    } - {"ops.RowTensor", "ops.BagTensor"}  # gradients
    public |= {f"nn.{name}" for name in ROWS}
    for name in nn.mxnet.__all__:
        value = getattr(nn.mxnet, name)
        if inspect.isclass(value) and issubclass(value, nn.mxnet.Optimizer):
            public.add(f"nn.mxnet.{name}")
    made = {name.partition("(")[0] for name in cases.SUBJECTS}
    assert public - made == {"nn.mxnet.Optimizer"}  # the base of users' own
    assert {case.name.partition("/")[2] for case in cases.STEPS} == cases.SUBJECTS.keys()


def test_an_entry_is_named_after_what_it_makes() -> None:
    for name, optimizer in optimizers.OPTIMIZERS.items():
        made = optimizer.make([np.ones((2, 2), np.float32)])
        assert type(made).__name__ == name.partition("(")[0]
    for name, operator in cases.OPERATORS.items():
        assert operator.make is getattr(ops, name)
    for name, subject in mxnet_subjects.MXNET.items():
        if name.startswith("nn.mxnet."):
            made: Any = subject.prepare
            cls = getattr(nn.mxnet, name.removeprefix("nn.mxnet.").partition("(")[0])
            assert made.func is mxnet_subjects.optimizer
            assert type(nn.mxnet.create(made.args[0], **made.args[1])) is cls


def test_names_are_unique_and_say_the_workload() -> None:
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    for case in cases.STEPS:
        workload, _, subject = case.name.partition("/")
        assert case.subject is cases.SUBJECTS[subject]
        assert case.model == (workload if workload not in ("dense", "rows", "pooled") else None)
        small = TINY if case.model is None else None
        if case.model in (None, "many-small"):
            assert kind_of(point(case.name, small or "").tensors()) == case.kind


@pytest.mark.parametrize("case", cases.SPECIAL, ids=[case.name for case in cases.SPECIAL])
def test_a_case_with_a_method_of_its_own_says_what_it_measures(
    case: cases.SpecialCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module does, in one line."""
    module = import_module(f"fusestep.bench.special.{case.name.replace('-', '_')}")
    monkeypatch.setattr(module, "run", lambda result, *_: result.limits.update(x=1.0))
    found = run.measure(case, Request([], [], {}, 1.0, []), 1, Peers({}), quiet)
    assert isinstance(found, SpecialResult)
    assert (found.name, found.limits) == (case.name, {"x": 1.0})
    assert 20 < len(found.summary) < 100 and "\n" not in found.summary


def kind_of(tensors: workloads.Tensors) -> str:
    """Which gradients there are."""
    if any(tensor.bag is not None for tensor in tensors):
        return "pooled"
    sparse = {tensor.B is not None for tensor in tensors}
    return "mixed" if len(sparse) == 2 else "rows" if True in sparse else "dense"


def test_every_name_without_default_is_a_case() -> None:
    """A name with a slip of the pen would be run by default without a word."""
    names = {case.name for case in cases.STEPS}
    assert names >= cases._WHEN_NAMED
    assert names >= cases._DEFAULT_ON_MODELS


# -- selection ------------------------------------------------------------------------------------


def selected(*patterns: str) -> list[str]:
    return [case.name for case in cases.select(list(patterns))]


def test_selection() -> None:
    assert selected("nn.LazyAdam") == [
        "dense/nn.LazyAdam", "rows/nn.LazyAdam", "dlrm/nn.LazyAdam", "bags/nn.LazyAdam",
    ]  # fmt: skip
    assert selected("rows/nn.LazyAdam") == ["rows/nn.LazyAdam"]
    assert selected("first-step", "far-*") == ["far-rows", "first-step"]  # as in the table
    assert selected("rows/*") == [case.name for case in cases.STEPS if case.kind == "rows"]
    assert selected("*") == [case.name for case in cases.CASES]
    assert selected("nn.Adam(amsgrad)", "nn.Adam(*") == [
        "dense/nn.Adam(nesterov)", "dense/nn.Adam(amsgrad)",
    ]  # fmt: skip


def test_the_default_selection_is_that_of_the_optimizers() -> None:
    default = selected()
    assert "first-step" in default
    assert "far-rows" not in default
    of_steps = {name.partition("/")[2] for name in default if name != "first-step"}
    assert of_steps <= {f"nn.{name}" for name in optimizers.OPTIMIZERS}
    assert {"dense/nn.Adam", "rows/nn.LazyAdam", "resnet50/nn.Momentum"} <= {*default}
    assert not cases._WHEN_NAMED & {*default}


# -- sizes and shapes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", {"dense": ["1000"]}),
        ("1K, 16M,1K", {"dense": ["1K", "16M"]}),
        ("1K..64M", {"dense": ["1K", "4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M"]}),
        ("1000..5000", {"dense": ["1000", "4000"]}),
        ("10Kx16x1K,7", {"dense": ["7"], "rows": ["10Kx16x1K"]}),
        ("10x256K", {"dense": ["10x256K"]}),
        (
            "all",
            {
                "dense": list(workloads.DENSE_SIZES),
                "rows": list(workloads.ROW_SIZES),
                "pooled": list(workloads.POOLED_SIZES)}),
        ("far,1Kx2x3", {"rows": [*workloads.FAR_SIZES, "1Kx2x3"]}),
        ("growth,1Kx2x3x4", {"pooled": [*workloads.GROWTH_SIZES, "1Kx2x3x4"]}),
        ("click-logx64x9x1,5x1x2x3x4", {"pooled": ["click-logx64x9x1", "5x1x2x3x4"]})])  # fmt: skip
def test_sizes(text: str, expected: dict[str, list[str]]) -> None:
    assert parse_sizes(text) == {"dense": [], "rows": [], "pooled": [], **expected}


WRONG = "0 -1 1k 1.5M M 1K.. 4K..1K 1Kx 1x2x3x4x5x6 0x1x1 1T click-log 9xclick-logx8x2x1"


@pytest.mark.parametrize("text", ["", *WRONG.split()])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(BenchError, match="--size: expected"):
        parse_sizes(text)


def test_numbers_have_units_of_1024() -> None:
    assert [workloads.number(text) for text in ("1", "2K", "3M", "1G")] == [1, 2048, 3 << 20, 2**30]
    for n in (1, 1000, 1024, 3 << 20, 2**30, 1536):
        assert workloads.number(workloads.label(n)) == n
    for size, count in (("3x2K", 3), ("2K", 1)):
        assert [tensor.shape for tensor in workloads.dense(size)] == [(2048,)] * count


def test_points_are_all_combinations_that_there_are() -> None:
    chosen = [named("dense/nn.SGD"), named("rows/ops.FusedSparseAdam")]
    found = cases.points(
        chosen, "1K,4K,9x2x5", ["float32", "float16"], [1, 2], ["uniform", "equal"],
        ["loop", "busy"])  # fmt: skip
    dense = [point for point in found if point.case.kind == "dense"]
    rows = [point for point in found if point.case.kind == "rows"]
    assert len(dense) == 2 * 2 * 2 * 2  # sizes, dtypes, threads, scenarios
    assert len(rows) == 2 * 2 * 2  # float32 only; distributions, threads, scenarios
    assert {point.distribution for point in rows} == {"uniform", "equal"}
    assert len({(point.title, point.distribution) for point in found}) == len(found)
    assert rows[0].title == "rows/ops.FusedSparseAdam 9x2x5 uniform float32 x1"
    assert rows[1].title == "rows/ops.FusedSparseAdam 9x2x5 uniform float32 x1 busy"


def test_shapes_of_the_workloads() -> None:
    assert [t.shape for t in point("dense/nn.SGD", "1K").tensors()] == [(1024,)]
    assert [t.shape for t in point("dense/nn.AdaFactor", "1K").tensors()] == [(32, 32)]
    (table,) = point("rows/nn.SGD", "10Kx16x1K").tensors()
    assert (table.shape, table.B, table.indices) == ((10240, 16), 1024, "zipf1.2")
    pooled = point("pooled/ops.EmbeddingBags", "5x10x3x7x2").tensors()
    assert pooled == (workloads.Tensor((10, 3), 14, "zipf1.2", 2),) * 5
    one, *others = point("pooled/ops.EmbeddingBags", "10x3x7x2").tensors()
    assert (one, others) == (pooled[0], [])
    log = point("pooled/ops.EmbeddingBags", "click-logx16x7x2").tensors()
    assert [t.shape for t in log] == [(n, 16) for n, _ in model_shapes.click_log_tables()]


def elements(shapes: list[tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape)) for shape in shapes)


def test_shapes_of_the_models() -> None:
    """As published: ResNet-50, GPT-2 small and DLRM for Criteo Kaggle."""
    resnet, gpt2 = model_shapes.resnet50(), model_shapes.gpt2_small()
    assert (len(resnet), elements(resnet)) == (161, 25_557_032)
    assert resnet[0] == (64, 3, 7, 7)
    assert resnet[-2:] == [(1000, 2048), (1000,)]
    assert (len(gpt2), elements(gpt2)) == (148, 124_439_808)
    tables = model_shapes.dlrm_tables()
    assert (len(tables), elements(tables)) == (26, 540_201_232)
    assert {shape[1] for shape in tables} == {16}
    assert model_shapes.dlrm_dense() == [
        *((512, 13), (512,), (256, 512), (256,), (64, 256), (64,), (16, 64), (16,)),
        *((512, 367), (512,), (256, 512), (256,), (1, 256), (1,)),
    ]
    small = model_shapes.many_small()
    assert len(small) == 200
    assert all(16 <= n <= 4096 for (n,) in small)
    dlrm = point("dlrm/nn.SGD").tensors()
    assert kind_of(dlrm) == "mixed"
    assert [t.B for t in dlrm] == [2048] * 26 + [None] * 14
    bags = point("bags/nn.SGD").tensors()
    assert [t.B for t in bags] == [20 * 2048] * 26 + [None] * 12
    assert (bags[0].shape, bags[25].shape) == ((100, 64), (500_000, 64))


# -- which rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*indices.PUBLISHED, "zipf3", "zipf1.0001"])
@pytest.mark.parametrize(("N", "B"), [(1, 1), (7, 100), (1000, 10)])
def test_indices_are_in_range_and_the_same_again(name: str, N: int, B: int) -> None:
    drawn = indices.draw(name, N, B, seed=3)
    assert drawn.shape == (B,)
    assert drawn.dtype == np.int64
    assert drawn.min() >= 0 and drawn.max() < N
    np.testing.assert_array_equal(drawn, indices.draw(name, N, B, seed=3))


def test_seeds_make_a_difference() -> None:
    for name in ("uniform", "zipf1.2", "equal"):
        one, other = (indices.draw(name, 1000, 50, seed) for seed in (0, 1))
        assert (one != other).any() == (name != "equal")
    assert np.unique(one).size == 1


@pytest.mark.parametrize("exponent", [1.05, 1.5])
def test_frequencies_follow_zipf(exponent: float) -> None:
    """Of the ten most frequent rows, within five standard deviations."""
    N, B = 1000, 100_000
    drawn = indices.draw(f"zipf{exponent}", N, B)
    found = np.sort(np.bincount(drawn, minlength=N))[::-1][:10]
    weights = np.arange(1, N + 1) ** -exponent
    expected = B * weights[:10] / weights.sum()
    assert (np.abs(found - expected) < 5 * np.sqrt(expected)).all()


def test_frequent_rows_are_scattered() -> None:
    drawn = indices.draw("zipf1.5", 10_000, 10_000)
    most = np.argsort(np.bincount(drawn, minlength=10_000))[-20:]
    assert most.max() > 5_000
    assert np.diff(np.sort(most)).max() > 100


# -- every entry takes steps ----------------------------------------------------------------------


@pytest.mark.parametrize(("case", "dtype"), sampled(EVERY_STEP, SOME_STEPS), ids=label)
def test_every_case_takes_steps(case: cases.Case, dtype: str, monkeypatch) -> None:
    """Two of them: finite numbers, and every parameter moves."""
    use_small_models(monkeypatch.setattr)
    given = work.inputs(point(case.name, "" if case.model else TINY, dtype))
    buffers = Buffers(case.subject.prepare, case.use, work.DTYPES[dtype], given.parameters)
    # LARS leaves those alone that are all 0; of 1, float16 is too coarse for its steps.
    for parameter in buffers.parameters:
        parameter.reshape(-1)[:] = 0.0
        parameter.reshape(-1)[::2] = 0.25
    start = [parameter.copy() for parameter in buffers.parameters]
    job, updated = buffers.job(fresh=True), buffers.prepared.updated
    for _ in range(2):
        job.load()
        results = arrays_of(job.step())
    for array in (*arrays_of(list(updated)), *results):
        assert np.isfinite(np.asarray(array).astype(np.float64)).all()
    now = [arrays[0] for arrays in updated if arrays]
    assert not any(np.array_equal(a, b) for a, b in zip(now, start, strict=False))
