"""GrowingEmbedding: several tables of one call, beside calls of one table after the other."""

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np
from fusestep import nn
from fusestep.nn import torch as fused

D, DRAW = 4, nn.UniformRows(0.3, seed=5)
OPTIMIZERS: dict[str, Any] = {
    "SparseAdam": {}, "AdamW": {"sparse": "touched"}, "LazyAdam": {"sparse": "catch_up"},
    "RowWiseAdagrad": {},
}  # fmt: skip


def growing(capacity: int = 20) -> Any:
    return fused.GrowingEmbedding(capacity, D, initial=DRAW)


def optimizer_of(name: str, model: Any) -> Any:
    return getattr(fused, name)(model.parameters(), lr=0.1, **OPTIMIZERS[name])


class Stopped(BaseException):
    """What no call expects, as an interrupt."""


class NewRows:
    """Weights of new rows; where one of the ids is `wrong` there is an error."""

    wrong = ""

    def __call__(self, ids: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        if self.wrong == "any" or self.wrong in map(str, ids.tolist()):
            raise Stopped
        return DRAW(ids, shape)


def four_tables(new_rows: NewRows) -> list[Any]:
    """Of which the second waits for occurrences and forgets, and the third has no other id 3."""
    options: list[dict[str, Any]] = [
        {"full": "evict"}, {"after": 2, "pending": 9}, {"padding_idx": 3, "full": "evict"},
        {"chance": 0.6},
    ]  # fmt: skip
    return [
        fused.GrowingEmbedding(21, d, initial=new_rows, seed=4, **own)
        for d, own in zip((4, 1, 33, 16), options, strict=True)
    ]


@pytest.mark.parametrize("form", ["lists", "joined"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_together_are_as_one_after_the_other(name: str, form: str) -> None:
    """Random calls, modes, errors and evictions; two features share a table, one never grows."""
    rng, new_rows = np.random.default_rng(len(name)), NewRows()
    features = [0, 4, 1, 2, 0, 3]
    together, alone = (
        [*four_tables(new_rows), torch.nn.Embedding(99, 3, _weight=torch.ones(99, 3), sparse=True)]
        for _ in range(2)
    )
    model = fused.EmbeddingBags(together, features=features)
    singles = [fused.EmbeddingBags([alone[t]], features=[0] * features.count(t)) for t in range(5)]
    optimizer = optimizer_of(name, model)
    other = optimizer_of(name, torch.nn.ModuleList(singles))

    def same() -> None:
        for a, b in zip(together[:4], alone[:4], strict=True):
            each = zip(a.ids.state_dict().items(), b.ids.state_dict().values(), strict=True)
            assert all(np.array_equal(x, y) for (_, x), y in each)
            assert all(map(np.array_equal, a.ids.last, b.ids.last))
            assert (a.ids.evictions, repr(a.ids)) == (b.ids.evictions, repr(b.ids))
            assert torch.equal(a.weight, b.weight)
            for role, state in optimizer.state[a.weight].items():
                assert np.array_equal(state, other.state[b.weight][role]), role

    def one_by_one(ids: Any, offsets: Any) -> list[Any]:
        outs: list[Any] = [None] * len(features)
        for t, single in enumerate(singles):
            each = [f for f, of in enumerate(features) if of == t]
            found = single([ids[f] for f in each], [offsets[f] for f in each])
            width = found.shape[1] // len(each)
            for f, out in zip(each, found.split(width, 1), strict=True):
                outs[f] = out
        return outs

    n_errors = n_steps = 0
    for number in range(50):
        frozen = rng.integers(0, 20)
        for t, tables in enumerate(zip(together[:4], alone[:4], strict=True)):
            mode = bool(rng.random() < 0.8)
            for table in tables:
                table.train(mode).weight.requires_grad_(bool(t != frozen))
        lengths = rng.integers(0, 4, (len(features), 3)) * (rng.random((len(features), 1)) < 0.7)
        ids = [torch.from_numpy(rng.integers(0, 9 + number, n.sum())) for n in lengths]
        offsets = [torch.from_numpy(np.cumsum(n) - n) for n in lengths]
        new_rows.wrong = str(rng.integers(0, 9 + number)) if rng.random() < 0.8 else ""
        call: tuple[Any, Any] = ids, offsets
        if form == "joined":
            call = torch.cat(ids), torch.from_numpy(np.append(0, np.cumsum(lengths)))
        try:
            out = model(*call)
        except Stopped:
            n_errors += 1
            new_rows.wrong = "any"
            are_next = [x._is_next for x in alone[:4]]
            for t, single in enumerate(singles[:4]):
                each = [f for f, of in enumerate(features) if of == t]
                with contextlib.suppress(Stopped):
                    single([ids[f] for f in each], [offsets[f] for f in each])
                alone[t]._is_next = are_next[t]  # no call of the tables together has ended
            optimizer.flush()
            other.flush()  # some have woken rows
            same()
            continue
        outs = one_by_one(ids, offsets)
        assert torch.equal(out, torch.cat(outs, 1))
        same()
        if frozen > 3 and rng.random() < 0.7:
            factor = torch.from_numpy(rng.standard_normal(out.shape).astype(np.float32))
            (out * factor).sum().backward()
            (torch.cat(outs, 1) * factor).sum().backward()
            if rng.random() < 0.7:
                n_steps += 1
                optimizer.step()
                other.step()
                if rng.random() < 0.8:
                    optimizer.zero_grad()
                    other.zero_grad()
                same()
        if rng.random() < 0.1:
            t = int(rng.integers(4))
            assert torch.equal(*(x[t].evict(unused_for=2) for x in (together, alone)))
    optimizer.flush()
    other.flush()
    same()
    assert n_errors > 2 < n_steps


def test_tables_that_share_a_map() -> None:
    """They are looked up one after the other, also where the second has the map make room."""
    tables = [growing(4_000) for _ in range(2)]
    tables[1].ids = tables[0].ids
    model = fused.EmbeddingBags(tables)
    ids = torch.arange(500)[:, None], torch.arange(400, 1_400).reshape(500, 2) * 3
    out = model([*ids])
    assert out.shape == (500, 2 * D)
    rows = [table.find(own) for table, own in zip(tables, ids, strict=True)]
    assert all(x.all() for x in rows) and len(tables[0].ids) == len(
        {*torch.cat(ids, 1).flatten().tolist()}
    )


def test_growing_tables_of_no_feature() -> None:
    """Nothing is looked up in them."""
    model = fused.EmbeddingBags([torch.nn.Embedding(5, D), growing()], features=[0, 0])
    assert model([torch.tensor([1, 2])] * 2).shape == (2, 2 * D)


def test_steps_end_with_those_of_the_map() -> None:
    """A step above the largest is refused, and nothing has changed."""
    table = growing()
    optimizer = optimizer_of("SparseAdam", table)
    table(torch.tensor([5, 6]))
    table.ids.load_state_dict({**table.ids.state_dict(), "step": np.array([2**31 - 1])})
    table._is_next = True
    with pytest.raises(ValueError, match="IdMap: step is out of range"):
        fused.EmbeddingBags([table])([torch.tensor([6, 7])])
    assert optimizer.state == {} and table.ids.step == 2**31 - 1 and len(table.ids) == 2
