"""What must have the same bits for any number of threads: prints of how many kinds they are.

Tensors of several parts, lists of them, tables with hot rows, and rows that occur once.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from fusestep import get_num_threads, nn, ops, set_num_threads
from fusestep.kernels.rules.lamb import LAMB_CLIPPED, lamb_scalars
from fusestep.kernels.storage import STORAGES
from fusestep.ops.norm import squares
from helpers import STORAGE_DTYPES, arrays_of
from optimizers import FORMS, is_row_wise, make
from test_bits import CASES as RULES
from test_bits import problem, run_dense, run_rows
from test_measure import SHAPES, array, measured
from test_norm import dense, mixture, rows
from test_row_wise import Counted

LARGE = [(300_000,), (701, 333), (5,), (33, 3), (2, 70_000), (40_000, 2), (7, 50, 60)]
OF_ROWS = [(3_000, 70), (1, 200_000), (40_000,), (0, 5), (17, 9_001)]
MEASURED = "Lamb", "Lamb-clipped", "LARS", "LARS-AdaFactor", "AdaFactor"
TABLES = [(50, 16), (3_000, 64), (300, 5)]


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def hot_rows(rng: np.random.Generator, shape: tuple[int, ...], n: int = 30_000) -> nn.RowTensor:
    indices = rng.zipf(1.3, n) % shape[0]
    indices[::3] = 5 % shape[0]
    return nn.RowTensor(indices, numbers(rng, (n, *shape[1:])), shape)


def of_rule(name: str) -> Iterator[Any]:
    """Dense steps, lazy ones and sweeps."""
    case = RULES[name]
    hp = case.hp(np.float32)
    arrays, g = problem(case, (90_001,))
    run_dense(case.rule, arrays, g, hp)
    yield arrays
    for lazy in (True, False):
        table, _ = problem(case, (900, 40))
        given = hot_rows(np.random.default_rng(3), (900, 40), 9_000)
        run_rows(case.rule, table, given.indices, given.values, hp, lazy=lazy)
        yield table


def steps(build: Callable[[Any], Any], shapes: Any, dtype: Any = np.float32) -> Iterator[Any]:
    """Two dense steps, and two with rows where there are some."""
    rng = np.random.default_rng(0)
    params = [numbers(rng, shape, dtype) for shape in shapes]
    opt = build(params)
    for _ in range(2):
        opt([numbers(rng, shape, dtype) for shape in shapes])
    yield params
    yield opt.state_dict()


def steps_of_rows(build: Callable[[Any], Any]) -> Iterator[Any]:
    rng, shape = np.random.default_rng(9), (20_011, 32)
    params = [numbers(rng, shape), numbers(rng, shape)]
    opt = build(params)
    for _ in range(2):
        opt([numbers(rng, shape), hot_rows(rng, shape)])
    yield params
    yield opt.state_dict()


def steps_of_mxnet(name: str, **options: Any) -> Iterator[Any]:
    """Weights of several types, some with a master copy, beside tables with hot rows."""
    rng, tables = np.random.default_rng(19), [(900, 40), (2_000, 7)]
    forms = [((140_000,), "f4"), ((300, 257), "f4"), ((5,), "f8"), ((33, 3), "f2")]
    weights = [numbers(rng, *form) for form in (*forms, *((shape, "f4") for shape in tables))]
    more = {"wd": 0.1, "clip_gradient": 0.5, "multi_precision": True, **options}
    updater = nn.mxnet.get_updater(nn.mxnet.create(name, learning_rate=0.1, **more))
    for _ in range(2):
        gradients = [numbers(rng, *form) for form in forms]
        gradients += [hot_rows(rng, shape, 20_000) for shape in tables]
        updater([*range(6)], gradients, weights)
    yield weights
    yield [updater.states[k] for k in range(6)]


def bags_of(rng: np.random.Generator) -> tuple[list[Any], list[Any]]:
    """Ids and offsets of tables; some bags are empty."""
    bounds = [np.append(0, np.cumsum(rng.integers(0, 21, 1_500))) for _ in TABLES]
    return [rng.integers(0, n, b[-1]) for (n, _), b in zip(TABLES, bounds, strict=True)], bounds


def bags(**options: Any) -> Iterator[Any]:
    rng = np.random.default_rng(0)
    tables, given = [numbers(rng, shape) for shape in TABLES], bags_of(rng)
    made = ops.EmbeddingBags(**options)
    out = made(tables, *given)
    yield out
    for found in made.gradients(tables, *given, out):
        yield [found.indices, found.rows]


def steps_of_bags(form: str, how: str) -> Iterator[Any]:
    rng = np.random.default_rng(0)
    opt = make(form, [numbers(rng, shape) for shape in TABLES], sparse_update=how)
    made = nn.EmbeddingBags(opt.parameters, opt, "mean")
    for _ in range(2):
        made.backward(numbers(rng, made(*bags_of(rng)).shape))
    yield opt


def sums_of_squares() -> Iterator[Any]:
    """Alone and together."""
    for dtype in STORAGE_DTYPES:
        arrays = [array(shape, dtype, seed=k) for k, shape in enumerate(SHAPES)]
        yield squares(STORAGES[dtype], arrays)
        yield [squares(STORAGES[dtype], [x]) for x in arrays]
    tensors = [
        [array((n,), np.float32, seed=k) ** 2 for k in range(4)] for n in (300_001, 5, 65_537)
    ]
    scalars = [lamb_scalars(np.float32, 0.1, 0.1, 2, (0.9, 0.99, 1e-3), ())] * 3
    states = [(w, m, v) for w, _, m, v in tensors]
    yield measured(LAMB_CLIPPED, (), states, [g for _, g, _, _ in tensors], scalars)


def gathered() -> Iterator[Any]:
    rng = np.random.default_rng(0)
    yield ops.SparseGatherV2()(numbers(rng, (900, 40)), rng.integers(0, 900, 30_000), 0)


def norms() -> Iterator[Any]:
    hot = rows(np.where(np.arange(60_000) % 3, np.arange(60_000) ** 2 % 900, 5), (17,), 900)
    hot.values[...] = dense(hot.values.shape)
    yield np.array([ops.global_norm([hot]), ops.global_norm([*mixture(), hot])])
    yield ops.clip_by_global_norm(
        [g for g in (dense(300_000), *mixture(10.0), dense(200_000, seed=4)) if g is not None],
        0.5, in_place=True)  # fmt: skip


CASES: dict[str, Callable[[], Iterator[Any]]] = {
    **{f"rule {name}": partial(of_rule, name) for name in RULES},
    **{
        f"{form} {dtype.__name__}": partial(steps, partial(make, form), LARGE, dtype)
        for form in FORMS
        for dtype in (np.float32, *[np.float16] * (form in MEASURED))
        if not is_row_wise(form)},
    "LARS-Lamb": partial(steps, lambda p: nn.LARS(nn.Lamb(p, 0.5), coefficient=0.1), LARGE),
    **{
        build.__name__: partial(steps, build, OF_ROWS)
        for build in (nn.RowWiseAdagrad, nn.RowWiseAdam, Counted)},
    **{
        f"{clip} {how}": partial(
            steps_of_rows,
            partial(nn.LazyAdam, weight_decay=0.1, sparse_update=how, **{clip: 0.1}))
        for clip in ("clipvalue", "clipnorm")
        for how in ("lazy", "dense_equivalent")},
    **{
        f"mxnet {name} {options}": partial(steps_of_mxnet, name, **options)
        for name in ("adam", "adamw")
        for options in ({}, {"use_fused_step": False}, {"compat": "1.9"})
        if (name, options) != ("adamw", {"compat": "1.9"})  # has none
    },
    **{
        f"bags {options}": partial(bags, **options)
        for options in ({}, {"padding_idx": 1}, {"pooling": "mean"}, {"pooling": "max"})},
    **{
        f"bags {form} {how}": partial(steps_of_bags, form, how)
        for form in ("Adam", "Adagrad", "RowWiseAdam")
        for how in ("lazy", "dense_equivalent")},
    "sums of squares": sums_of_squares,
    "norms": norms,
    "gathered": gathered,
}  # fmt: skip


def main() -> None:
    """Print each case whose bits are of several kinds; then how many cases there are."""
    for name, case in CASES.items():
        found = set()
        for n in (1, 2, 3, 7):
            set_num_threads(n)
            assert get_num_threads() == n
            digest = hashlib.sha256()
            for part in case():
                arrays = arrays_of([part])
                assert arrays, name
                for one in arrays:
                    digest.update(one.tobytes())
            found.add(digest.hexdigest())
        if len(found) > 1:
            print(name)
    print(len(CASES))


if __name__ == "__main__":
    main()
