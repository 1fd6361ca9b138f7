"""Sums of gradient rows: every width, storage type and place, and segments of every length."""

import ctypes
from itertools import product

import numpy as np
import pytest
from fusestep import nn, ops
from fusestep.kernels import storage
from fusestep.kernels.cpu.rows import sums as forms
from fusestep.kernels.cpu.rows.layout import PADDING
from fusestep.kernels.cpu.rows.sums import accumulate
from helpers import assert_same_arrays, assert_same_bits, label, sampled

BITS = 10  # of a position in a key
FIRST = 100
WIDTHS = [*range(1, 20), 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 1_000, 5_000]
PAIRS = [
    (storage.F32, storage.F32), (storage.F16, storage.F32), (storage.BF16, storage.F32),
    (storage.F64, storage.F32), (storage.F32, storage.F64), (storage.F64, storage.F64),
    (storage.F16, storage.F64),
]  # fmt: skip


def compiled_sum(
    g: storage.Storage, real: storage.Storage, values: np.ndarray, positions: np.ndarray,
    form: forms.SumForm = forms.OWN, weights: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """The sum of ``values[positions]`` by the compiled loop; nothing beside it is written. Weights
    of maxima are winners, of which place 0 is number `FIRST`."""
    width, n = values.shape[1], len(positions)
    keys, mask = np.full(n + 2 + PADDING, -1, np.int64), (1 << BITS) - 1
    keys[1 : n + 1] = 7 << BITS | (positions if form is forms.OWN else np.arange(n))
    rows = np.zeros(1 << BITS, np.int32)
    rows[:n] = positions
    room = np.full(width + 2, 99, real.dtype)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 8)(accumulate(g, real, form).address)
    addresses = [0 if a is None else a.ctypes.data for a in (rows, weights)]
    source = np.array([values.ctypes.data, values.strides[0], *addresses, FIRST])
    for fetches in (0, 1):
        call(
            room[1:].ctypes.data, source.ctypes.data, keys.ctypes.data, 1, n + 1, width, mask,
            fetches)  # fmt: skip
    assert room[0] == room[-1] == 99
    return room[1:-1]


# Of float32 each form, of other types each form with one of them, and rows of their own with all.
FORMS = [(*pair, form) for n, form in enumerate(forms.FORMS) for pair in (PAIRS[0], PAIRS[1 + n])]
FORMS += [(*pair, forms.OWN) for pair in PAIRS if (*pair, forms.OWN) not in FORMS]


@pytest.mark.parametrize("n", [1, 2, 3, 40])
@pytest.mark.parametrize(
    ("g", "real", "form"),
    sampled(((*pair, form) for pair, form in product(PAIRS, forms.FORMS)), FORMS), ids=label,
)  # fmt: skip
def test_forms_of_sums(
    g: storage.Storage, real: storage.Storage, form: forms.SumForm, n: int
) -> None:
    """Rows of any stride, in the order of their keys, and each product rounded once."""
    rng = np.random.default_rng(3)
    for width in WIDTHS:
        values = rng.standard_normal((50, width + 3)).astype(g.dtype)[:, :width]
        values[rng.random(values.shape) < 0.3] *= 0  # zeros of both signs
        positions = rng.integers(0, 50, n)
        terms, weights = values[positions].astype(real.dtype), None
        if form.winners_only:  # in the form of the array that the values are a part of
            weights = rng.integers(FIRST, FIRST + n, (50, width + 3)).astype(np.int32)
            weights[positions[-1], :width:2] = FIRST + n - 1
            terms[weights[positions, :width] != FIRST + np.arange(n)[:, None]] = 0
        elif form.place:
            weights = rng.standard_normal(n).astype(real.dtype)
            terms *= weights[:, None]
        expected = np.add.accumulate(terms, axis=0)[-1]
        found = compiled_sum(g, real, values, positions, form, weights)
        assert_same_bits(found, expected, f"width {width}")


def test_special_values() -> None:
    """Infinities and NaN go through; a row that occurs once is not changed by the sum."""
    values = np.array([[np.inf, -np.inf, np.nan, -0.0, 1e-45] * 4] * 2, np.float32)
    assert_same_bits(compiled_sum(storage.F32, storage.F32, values, np.array([1])), values[1])
    values[1] = -values[1]
    twice = compiled_sum(storage.F32, storage.F32, values, np.array([0, 1]))
    assert np.isnan(twice.reshape(4, 5)[:, :3]).all()
    assert (twice.reshape(4, 5)[:, 3:] == 0).all()


@pytest.mark.parametrize("lazy", [False, True], ids=["dense_equivalent", "lazy"])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("longest", [1, 3, 31, 32, 33, 70, 400])
def test_segments_of_every_length(longest: int, index_dtype: type, lazy: bool) -> None:
    """Either side of the length from which the end of a segment is searched for. Several tables,
    the lists long enough for several threads and cut anywhere."""
    rng = np.random.default_rng(longest)
    tables, gradients, sums = [], [], []
    for n_rows, width in ((4_000, 5), (300, 64), (2_000, 1)):
        counts = rng.integers(0, longest + 1, n_rows)
        indices = rng.permutation(np.repeat(np.arange(n_rows), counts))[:12_000]
        values = rng.integers(-64, 65, (len(indices), width)).astype(np.float32) / 32
        tables.append(rng.standard_normal((n_rows, width)).astype(np.float32))
        gradients.append(ops.RowTensor(indices.astype(index_dtype), values, (n_rows, width)))
        dense = np.zeros((n_rows, width), np.float32)
        np.add.at(dense, indices, values)  # exact in any order
        sums.append(dense)
    dense = [table.copy() for table in tables]
    nn.Adam(tables, 0.1, use_lazy=lazy)(gradients)
    nn.Adam(dense, 0.1)(sums)
    assert_same_arrays(tables, dense)
