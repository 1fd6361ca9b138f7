"""What is wrong on one rank is an error of all, and nothing is written."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusestep import nn
from fusestep.nn import distributed
from fusestep.nn.distributed import Communicator, RowShard, all_reduce, together

from process_checks import everywhere, refused_everywhere
from process_training import Tables, Training

N = 97


def _copied(g: nn.RowTensor) -> nn.RowTensor:
    places = {"positions": g.positions, "batch_length": g.batch_length}
    return nn.RowTensor(g.indices, g.values.copy(), g.dense_shape, **places)


class _Errors:
    """The rank ``bad`` does something else than all others."""

    def __init__(self, comm: Communicator, bad: int) -> None:
        self.comm, self.bad = comm, bad
        # Rank 0 is what others are compared with: where it differs, all others are at fault.
        self.differing = f"rank {bad or 1}"

    def only(self, wrong: Any, usual: Any) -> Any:
        return wrong if self.comm.rank == self.bad else usual

    def raises(self, kind: type[Exception], match: str, call: Any, *watched: Any) -> None:
        text = match.replace("BAD", f"rank {self.bad}").replace("DIFFERING", self.differing)
        refused_everywhere(self.comm, kind, text, call, *watched)

    def shards(self) -> None:
        comm, only = self.comm, self.only
        self.raises(ValueError, "DIFFERING: rows differ", lambda: RowShard(only(N + 1, N), comm))
        self.raises(ValueError, "DIFFERING: order differ",
            lambda: RowShard(N, comm, order=only("hash", "range")))  # fmt: skip
        self.raises(ValueError, "BAD: order is unknown",
            lambda: RowShard(N, comm, order=only("sorted", "range")))  # fmt: skip
        self.raises(TypeError, "BAD: rows has a wrong type", lambda: RowShard(only(1.5, N), comm))
        self.raises(ValueError, "BAD: rows", lambda: RowShard(only(-1, N), comm))
        too_many = only(2**40, N)
        self.raises(ValueError, "BAD: rows", lambda: RowShard(too_many, comm, order="hash"))

    def routes(self) -> None:
        shard, usual = RowShard(N, self.comm), np.arange(4)
        wrong: list[tuple[type[Exception], str, Any]] = [
            (IndexError, r"BAD: indices\[2\] is out of range.*got 97", np.array([1, 2, N])),
            (IndexError, r"BAD: indices\[0\] is out of range", np.array([-1, 2])),
            (TypeError, "BAD: ", np.ones(3, np.float32)),
            (TypeError, "BAD: ", np.ones(3, np.int16)),
            (TypeError, "BAD: ", [1, 2]),
        ]
        for kind, match, ids in wrong:
            given = self.only(ids, usual)
            self.raises(kind, match, lambda ids=given: shard.route(ids))
        other = self.only(RowShard(N, self.comm, order="hash"), shard)
        self.raises(ValueError, "DIFFERING: order differ", lambda: other.route(usual))

    def tables(self) -> None:
        shard = RowShard(N, self.comm)
        route, table = shard.route(np.arange(4)), np.ones((len(shard), 3), np.float32)
        gradient = np.ones((4, 3), np.float32)
        wrong: list[tuple[type[Exception], str, Any, Any]] = [
            (
                ValueError,
                "DIFFERING: dtype differ",
                table.astype(np.float64),
                gradient.astype(np.float64),
            ),
            (
                ValueError,
                r"DIFFERING: shape of a row(\[0\])? differs",
                table[:, :2].copy(),
                gradient[:, :2].copy(),
            ),
            (
                ValueError,
                r"DIFFERING: shape of a row(\[0\])? differs",
                table[:, 0].copy(),
                gradient[:, 0].copy(),
            ),
            (ValueError, "BAD: .*wrong shape", np.ones((N + 5, 3), np.float32), gradient[:3]),
            (
                ValueError,
                "BAD: .*wrong shape",
                np.float32(1).reshape(()),
                np.float32(1).reshape(()),
            ),
            (TypeError, "BAD: ", table.astype(np.int64), gradient.astype(np.int64)),
            (TypeError, "BAD: ", "table", None),
        ]
        for kind, match, wrong_table, wrong_gradient in wrong:
            of_rank = self.only(wrong_table, table), self.only(wrong_gradient, gradient)
            self.raises(kind, match, lambda of=of_rank: route.gather(of[0]), table)
            self.raises(kind, match, lambda of=of_rank: route.scatter(of[1]), table)

    def optimizers(self) -> None:
        comm, only = self.comm, self.only

        def parameters(dtype: Any = np.float32, name: str = "w", tail: int = 2) -> Any:
            return [nn.Parameter(np.ones((4, tail), dtype), name)]

        def new(cls: Any = nn.LazyAdam, params: Any = None, **options: Any) -> Any:
            return cls(params or parameters(), **options)

        stepped = new()
        stepped((np.ones((4, 2), np.float32),))
        wrong = {
            "optimizer differ": new(nn.FTRL),
            r"parameters\[0\] differs": new(params=parameters(name="v")),
            r"dtypes\[0\] differs": new(params=parameters(np.float16)),
            r"shapes of rows\[0\]\[0\] differs": new(params=parameters(tail=3)),
            r"options\[1\] differs": new(beta1=0.5),
            r"options\[0\] differs": new(sparse_update="dense_equivalent"),
            "global_step differ": stepped,
        }
        for match, optimizer in wrong.items():
            given = only(optimizer, new())
            self.raises(ValueError, f"DIFFERING: {match}", lambda o=given: together(o, comm))
            assert given.together is None
        given = only("Adam", new())
        self.raises(TypeError, "BAD: optimizer has a wrong type", lambda: together(given, comm))

    def steps(self) -> None:
        """The step of an optimizer that has states already, with hot rows."""
        tables = Tables(self.comm, "hash")
        for options in ({}, {"skip_nonfinite": True}):
            one = Training("Adam", np.float32, tables, sparse_update="lazy", **options)
            one.steps(2)
            self._wrong_gradients(one, tables)
        self._skipped_step(one, tables)
        self._other_numbers(one, tables.gradients(2, one.dtype))
        one.steps(1)  # and it goes on: as if nothing had been wrong
        whole = Training("Adam", np.float32, skip_nonfinite=True, sparse_update="lazy")
        whole.steps(3)
        for p, q in zip(one.params, whole.params, strict=True):
            assert (p.data == q.data[tables.shards[p.name].indices]).all()

    def _wrong_gradients(self, one: Training, tables: Tables) -> None:
        opt, arrays, only = one.optimizer, one.arrays(), self.only
        usual = tables.gradients(2, one.dtype)

        def step_with(wrong: Any) -> Any:
            given = [usual[0], only(wrong, usual[1]), *usual[2:]]
            return lambda: opt(tuple(given))

        shape = usual[1].dense_shape
        ones = np.ones(1, np.float32)
        wrong: list[tuple[type[Exception], str, Any]] = [
            (IndexError, "BAD: .*is out of range", nn.RowTensor(np.array([99]), ones, shape)),
            (ValueError, "BAD: ", np.ones((99, 2), np.float32)),
            (TypeError, "BAD: ", np.ones(shape, np.int64)),
            (TypeError, "BAD: ", "gradient"),
        ]
        for kind, match, gradient in wrong:
            self.raises(kind, match, step_with(gradient), *arrays)
        given = only(usual[:1], usual)
        self.raises(ValueError, "BAD: .*wrong length", lambda: opt(tuple(given)), *arrays)

    def _skipped_step(self, one: Training, tables: Tables) -> None:
        """A NaN on any rank that has an occurrence: no rank takes the step, all count it."""
        opt, comm, arrays = one.optimizer, self.comm, one.arrays()[:-1]
        before = [array.tobytes() for array in arrays]
        for bad in range(comm.size):
            gradients = [_copied(g) for g in tables.gradients(2, one.dtype)]
            if comm.rank == bad:
                gradients[0].values[-1:] = np.nan
            skipped = opt.skipped_steps
            opt(tuple(gradients))
            assert everywhere(comm, opt.skipped_steps) == [str(skipped + 1)] * comm.size
            assert [array.tobytes() for array in arrays] == before

    def _other_numbers(self, one: Training, usual: Any) -> None:
        opt = one.optimizer
        rate = opt.learning_rate
        known = rate.data.copy()
        if self.comm.rank == self.bad:
            rate.data = np.asarray(known * 2, known.dtype)
        text = "DIFFERING: rates, decays, loss scale, options or batches differ"
        self.raises(ValueError, text, lambda: opt(tuple(usual)), *one.arrays())
        rate.data = known
        if self.comm.rank == self.bad:
            opt.global_step = opt.global_step + np.int32(1)
        self.raises(ValueError, "DIFFERING: global_step", lambda: opt(tuple(usual)), *one.arrays())
        if self.comm.rank == self.bad:
            opt.global_step = opt.global_step - np.int32(1)

    def options(self) -> None:
        """What a step reads anew, or `together` does not look at."""
        params, gradient = [np.ones((4, 2), np.float32)], np.ones((4, 2), np.float32)

        is_bad = self.comm.rank == self.bad

        class Broken(nn.LearningRateSchedule):
            def construct(self, step: Any) -> Any:
                if is_bad:
                    raise ZeroDivisionError(f"at {step}")
                return np.float32(0.1)

        text = "DIFFERING: rates, decays, loss scale, options or batches differ"
        group = {"params": params, "grad_centralization": is_bad}
        wrong: list[tuple[type[Exception], str, Any]] = [
            (ValueError, text, nn.Adam(params, loss_scale=4.0 if is_bad else 1.0)),
            (ValueError, text, nn.Adam(params, skip_nonfinite=is_bad)),
            (ValueError, text, nn.Adam([group])),
            (RuntimeError, "BAD: ZeroDivisionError: ", nn.Adam(params, Broken())),
        ]
        for kind, match, opt in wrong:
            together(opt, self.comm)
            self.raises(kind, match, lambda opt=opt: opt((gradient,)), *params)

    def batches(self) -> None:
        """Gradients of batches of different processes."""
        shards = [RowShard(4, comm) for comm in (self.comm, distributed.alone())]
        shard = shards[self.comm.rank == self.bad]
        table = np.ones((len(shard), 2), np.float32)
        opt = nn.LazyAdam([table])
        together(opt, self.comm)
        route = shards[0].route(np.array([1, 2]))
        gradient = route.scatter(np.ones((2, 2), np.float32))
        if self.comm.rank == self.bad:
            gradient = shard.route(np.array([1, 2])).scatter(np.ones((2, 2), np.float32))
        text = "DIFFERING: rates, decays, loss scale, options or batches differ"
        self.raises(ValueError, text, lambda: opt((gradient,)), table)

    def calls(self, folder: str = "/nowhere") -> None:
        """One does another thing than the others."""
        comm, shard = self.comm, RowShard(N, self.comm)
        route, table = shard.route(np.arange(3)), np.ones((len(shard), 3), np.float32)
        opt = nn.LazyAdam([nn.Parameter(table, "table")])
        together(opt, comm)
        gradient, dense = route.scatter(np.ones((3, 3), np.float32)), np.ones(3, np.float32)
        calls = {
            "RowShard.route": lambda: shard.route(np.arange(3)),
            "Route.gather": lambda: route.gather(table),
            "Route.scatter": lambda: route.scatter(np.ones((3, 3), np.float32)),
            "LazyAdam": lambda: opt((gradient,)),
            "all_reduce": lambda: all_reduce([dense], comm),
            "RowShard": lambda: RowShard(N, comm),
            "together": lambda: together(opt, comm),
            "ShardedStates": lambda: distributed.ShardedStates(nn.Adam([dense.copy()]), comm),
            "save_checkpoint": lambda: distributed.save_checkpoint(folder, opt, comm),
            "load_checkpoint": lambda: distributed.load_checkpoint(folder, opt, comm),
        }
        arrays = [table, *opt.state_arrays().values()]
        names = list(calls)
        for name, other in zip(names, names[1:] + names[:1], strict=True):
            of_first, of_others = (other, name) if self.bad == 0 else (name, other)
            wrong = f"expected {of_first} as rank 0, got {of_others}"
            text = f"^{of_first}: DIFFERING calls something else: {wrong}"
            self.raises(ValueError, text, calls[self.only(other, name)], *arrays)


def check(comm: Communicator, bad: int) -> None:
    if comm.size == 1:
        return
    of_bad = _Errors(comm, bad)
    of_bad.shards()
    of_bad.routes()
    of_bad.tables()
    of_bad.optimizers()
    of_bad.steps()
    of_bad.options()
    of_bad.batches()
    of_bad.calls()
