"""What is wrong on one rank is an error of all, and nothing is written."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from fusestep import nn
from fusestep.nn import distributed
from fusestep.nn.distributed import Communicator, RowShard, all_reduce, together
from process_checks import everywhere, refused_everywhere
from process_training import Tables, Training

N = 97
NUMBERS = "DIFFERING: rates, decays, loss scale, options or batches differ"
Case = tuple[type[Exception], str, Callable[[], Any]]
"""An error, its text, and the call that raises it."""


class _Errors:
    """The rank ``bad`` does something else than all others."""

    def __init__(self, comm: Communicator, bad: int) -> None:
        self.comm, self.bad, self.is_bad = comm, bad, comm.rank == bad

    def only(self, wrong: Any, usual: Any) -> Any:
        return wrong if self.is_bad else usual

    def raises(self, kind: type[Exception], match: str, call: Any, *watched: Any) -> None:
        # Rank 0 is what others are compared with: where it differs, all others are at fault.
        text = match.replace("BAD", f"rank {self.bad}")
        text = text.replace("DIFFERING", f"rank {self.bad or 1}")
        refused_everywhere(self.comm, kind, text, call, *watched)

    def shards(self) -> Iterator[Case]:
        wrong: list[tuple[type[Exception], str, Any, dict[str, str]]] = [
            (ValueError, "DIFFERING: rows differ", N + 1, {}),
            (ValueError, "DIFFERING: order differ", N, {"order": "hash"}),
            (ValueError, "BAD: order is unknown", N, {"order": "sorted"}),
            (TypeError, "BAD: rows has a wrong type", 1.5, {}), (ValueError, "BAD: rows", -1, {}),
            (ValueError, "BAD: rows", 2**40, {"order": "hash"}),
        ]  # fmt: skip
        for kind, match, rows, options in wrong:
            given = self.only((rows, options), (N, {}))
            yield kind, match, lambda g=given: RowShard(g[0], self.comm, **g[1])

    def routes(self) -> Iterator[Case]:
        shard, usual = RowShard(N, self.comm), np.arange(4)
        for kind, match, ids in (
            (IndexError, r"BAD: indices\[2\] is out of range.*got 97", np.array([1, 2, N])),
            (IndexError, r"BAD: indices\[0\] is out of range", np.array([-1, 2])),
            (TypeError, "BAD: ", np.ones(3, np.float32)),
            (TypeError, "BAD: ", np.ones(3, np.int16)), (TypeError, "BAD: ", [1, 2]),
        ):  # fmt: skip
            yield kind, match, partial(shard.route, self.only(ids, usual))
        other = self.only(RowShard(N, self.comm, order="hash"), shard)
        yield ValueError, "DIFFERING: order differ", lambda: other.route(usual)

    def tables(self) -> Iterator[Case]:
        shard = RowShard(N, self.comm)
        route, table = shard.route(np.arange(4)), np.ones((len(shard), 3), np.float32)
        gradient, number = np.ones((4, 3), np.float32), np.float32(1).reshape(())
        of_a_row = r"DIFFERING: shape of a row(\[0\])? differs"
        for kind, match, change in (
            (ValueError, "DIFFERING: dtype differ", lambda a: a.astype(np.float64)),
            (ValueError, of_a_row, lambda a: a[:, :2].copy()),
            (ValueError, of_a_row, lambda a: a[:, 0].copy()),
            (ValueError, "BAD: .*wrong shape", lambda a: np.ones((len(a) + 5, 3), np.float32)),
            (ValueError, "BAD: .*wrong shape", lambda _: number),
            (TypeError, "BAD: ", lambda a: a.astype(np.int64)),
            (TypeError, "BAD: ", lambda _: "table"),
        ):
            for call, usual in ((route.gather, table), (route.scatter, gradient)):
                yield kind, match, partial(call, self.only(change(usual), usual))
        assert (table == 1).all() and (gradient == 1).all()

    def optimizers(self) -> Iterator[Case]:
        def new(
            cls=nn.LazyAdam, dtype=np.float32, name: str = "w", tail: int = 2, **options
        ) -> Any:
            return cls([nn.Parameter(np.ones((4, tail), dtype), name)], **options)

        stepped = new()
        stepped((np.ones((4, 2), np.float32),))
        for match, optimizer in {
            "optimizer differ": new(nn.FTRL), r"parameters\[0\] differs": new(name="v"),
            r"dtypes\[0\] differs": new(dtype=np.float16),
            r"shapes of rows\[0\]\[0\] differs": new(tail=3),
            r"options\[1\] differs": new(beta1=0.5),
            r"options\[0\] differs": new(sparse_update="dense_equivalent"),
            "global_step differ": stepped,
        }.items():  # fmt: skip
            given = self.only(optimizer, new())
            yield ValueError, f"DIFFERING: {match}", lambda o=given: together(o, self.comm)
            assert given.together is None
        given = self.only("Adam", new())
        yield TypeError, "BAD: optimizer has a wrong type", lambda: together(given, self.comm)

    def options(self) -> Iterator[Case]:
        """What a step reads anew, or `together` does not look at."""
        params, gradient = [np.ones((4, 2), np.float32)], np.ones((4, 2), np.float32)
        is_bad = self.is_bad

        class Broken(nn.LearningRateSchedule):
            def construct(self, step: Any) -> Any:
                if is_bad:
                    raise ZeroDivisionError(f"at {step}")
                return np.float32(0.1)

        for kind, match, opt in (
            (ValueError, NUMBERS, nn.Adam(params, loss_scale=4.0 if is_bad else 1.0)),
            (ValueError, NUMBERS, nn.Adam(params, skip_nonfinite=is_bad)),
            (ValueError, NUMBERS, nn.Adam([{"params": params, "grad_centralization": is_bad}])),
            (RuntimeError, "BAD: ZeroDivisionError: ", nn.Adam(params, Broken())),
        ):
            together(opt, self.comm)
            yield kind, match, lambda opt=opt: opt((gradient,))
        assert (params[0] == 1).all()

    def batches(self) -> Iterator[Case]:
        """Gradients of batches of different processes."""
        shards = [RowShard(4, comm) for comm in (self.comm, distributed.alone())]
        table = np.ones((len(shards[self.is_bad]), 2), np.float32)
        opt = nn.LazyAdam([table])
        together(opt, self.comm)
        gradient = shards[0].route(np.array([1, 2])).scatter(np.ones((2, 2), np.float32))
        if self.is_bad:
            gradient = shards[1].route(np.array([1, 2])).scatter(np.ones((2, 2), np.float32))
        yield ValueError, NUMBERS, lambda: opt((gradient,))
        assert (table == 1).all()

    def calls(self) -> Iterator[Case]:
        """One does another thing than the others."""
        comm, shard = self.comm, RowShard(N, self.comm)
        route, table = shard.route(np.arange(3)), np.ones((len(shard), 3), np.float32)
        opt = nn.LazyAdam([nn.Parameter(table, "table")])
        together(opt, comm)
        gradient, dense = route.scatter(np.ones((3, 3), np.float32)), np.ones(3, np.float32)
        calls: dict[str, Callable[[], Any]] = {
            "RowShard.route": lambda: shard.route(np.arange(3)),
            "Route.gather": lambda: route.gather(table),
            "Route.scatter": lambda: route.scatter(np.ones((3, 3), np.float32)),
            "LazyAdam": lambda: opt((gradient,)), "all_reduce": lambda: all_reduce([dense], comm),
            "RowShard": lambda: RowShard(N, comm), "together": lambda: together(opt, comm),
            "ShardedStates": lambda: distributed.ShardedStates(nn.Adam([dense.copy()]), comm),
            "save_checkpoint": lambda: distributed.save_checkpoint("/nowhere", opt, comm),
            "load_checkpoint": lambda: distributed.load_checkpoint("/nowhere", opt, comm),
        }  # fmt: skip
        before = [array.tobytes() for array in (table, *opt.state_arrays().values())]
        names = list(calls)
        for name, other in zip(names, names[1:] + names[:1], strict=True):
            of_first, of_others = (other, name) if self.bad == 0 else (name, other)
            wrong = f"expected {of_first} as rank 0, got {of_others}"
            text = f"^{of_first}: DIFFERING calls something else: {wrong}"
            yield ValueError, text, calls[self.only(other, name)]
        assert before == [array.tobytes() for array in (table, *opt.state_arrays().values())]

    def steps(self) -> None:
        """The step of an optimizer that has states already, with hot rows."""
        tables = Tables(self.comm, "hash")
        for options in ({}, {"skip_nonfinite": True}):
            one = Training("Adam", np.float32, tables, sparse_update="lazy", **options)
            one.steps(2)
            self._wrong_gradients(one, tables.gradients(2, one.dtype))
        self._skipped_step(one, tables)
        self._other_numbers(one, tables.gradients(2, one.dtype))
        one.steps(1)  # and it goes on: as if nothing had been wrong
        whole = Training("Adam", np.float32, skip_nonfinite=True, sparse_update="lazy")
        whole.steps(3)
        for p, q in zip(one.params, whole.params, strict=True):
            assert (p.data == q.data[tables.shards[p.name].indices]).all()

    def _wrong_gradients(self, one: Training, usual: Any) -> None:
        first, second, *rest = usual
        shape = second.dense_shape
        outside = nn.RowTensor(np.array([99]), np.ones(1, np.float32), shape)
        for kind, match, wrong in (
            (IndexError, "is out of range", [first, outside, *rest]),
            (ValueError, "", [first, np.ones((99, 2), np.float32), *rest]),
            (TypeError, "", [first, np.ones(shape, np.int64), *rest]),
            (TypeError, "", [first, "gradient", *rest]), (ValueError, "wrong length", [first]),
        ):  # fmt: skip
            given = tuple(self.only(wrong, usual))
            self.raises(kind, f"BAD: .*{match}", lambda g=given: one.optimizer(g), *one.arrays())

    def _skipped_step(self, one: Training, tables: Tables) -> None:
        """A NaN on any rank that has an occurrence: no rank takes the step, all count it."""
        opt, comm, arrays = one.optimizer, self.comm, one.arrays()[:-1]
        before = [array.tobytes() for array in arrays]
        for bad in range(comm.size):
            gradients = copy.deepcopy(tables.gradients(2, one.dtype))
            if comm.rank == bad:
                gradients[0].values[-1:] = np.nan
            skipped = opt.skipped_steps
            opt(tuple(gradients))
            assert everywhere(comm, opt.skipped_steps) == [str(skipped + 1)] * comm.size
            assert [array.tobytes() for array in arrays] == before

    def _other_numbers(self, one: Training, usual: Any) -> None:
        opt, rate = one.optimizer, one.optimizer.learning_rate
        known = rate.data.copy()
        rate.data = self.only(np.asarray(known * 2, known.dtype), known)
        self.raises(ValueError, NUMBERS, lambda: opt(tuple(usual)), *one.arrays())
        rate.data = known
        opt.global_step = opt.global_step + np.int32(self.is_bad)
        self.raises(ValueError, "DIFFERING: global_step", lambda: opt(tuple(usual)), *one.arrays())
        opt.global_step = opt.global_step - np.int32(self.is_bad)


def check(comm: Communicator, bad: int) -> None:
    if comm.size == 1:
        return
    of_bad = _Errors(comm, bad)
    for cases in (
        of_bad.shards, of_bad.routes, of_bad.tables, of_bad.optimizers, of_bad.options,
        of_bad.batches, of_bad.calls,
    ):  # fmt: skip
        for case in cases():
            of_bad.raises(*case)
    of_bad.steps()
