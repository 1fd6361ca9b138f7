"""Iterations on a table that several processes of this machine own, and a model of more.

``fusestep bench --processes 1,2,4`` starts that many processes on this machine, one thread each,
over gloo. Beside the whole batch one process takes a quarter of it: from these two runs follows
what an iteration costs without others, and the runs with more processes check the model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np

from .. import machine
from ..cases.indices import DEFAULT, draw
from ..cases.model_shapes import click_log_tables
from ..cases.options import other_option, seconds_of
from ..errors import BenchError
from ..report import document, terminal
from ..report.table import Table, bold, markdown, memory, seconds

ROWS, BATCH = 500_000, 65_536
_QUICK_ROWS, _QUICK_BATCH = 20_000, 4_096
_SECONDS, _QUICK_SECONDS = 3.0, 1.0  # of a run
_TIMEOUT = 600.0
DIM = 64
NETWORKS = (10, 100, 400)  # Gbit/s
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # processes of the model
MODEL_BATCH = 1 << 20  # ids of the batch of all processes
_ROW = 4 * DIM  # bytes
POOLED, LENGTHS = 2_048, (1, 20)  # samples, and ids of a bag
_MESSAGE = 5e-6  # seconds that a process takes for each message of a fast network, assumed


def main(args: argparse.Namespace) -> int:
    """Measure, print, and write ``--json``.

    Raises:
        BenchError: an option is wrong, or a run fails.
    """
    if option := other_option(args, "processes", "json", "seconds", "quick"):
        raise BenchError(f"--processes: takes no {option}")
    if find_spec("torch") is None:
        raise BenchError("--processes: needs PyTorch, for gloo: pip install torch")
    counts = sorted({1, *args.processes})
    rows, batch = (_QUICK_ROWS, _QUICK_BATCH) if args.quick else (ROWS, BATCH)
    time = seconds_of(args, _SECONDS, _QUICK_SECONDS)
    with terminal.progress() as reports:
        runs, shared = [], []
        wanted = [(1, batch // 4), *((n, batch) for n in counts)]
        for k, (n, of_run) in enumerate(wanted):
            reports(f"{n} processes, {of_run:,} ids", k, len(wanted))(0.0)
            runs.append(_run(n, rows, of_run, time))
        pairs = [(length, n) for length in LENGTHS[: 1 if args.quick else 2] for n in counts]
        for k, (length, n) in enumerate(pairs):
            reports(f"{n} processes, bags of {length}", k, len(pairs))(0.0)
            shared.append(_pooled(n, length))
    data = {
        "machine": machine.machine(), "rows": rows, "dim": DIM, "runs": runs, "pooled": shared,
    }  # fmt: skip
    print(markdown(measured(data)), markdown(pooled(data)), sep="\n\n")
    if args.json is not None:
        document.write(args.json, data)
    return 0


def _started(n: int, *arguments: object) -> Any:
    """What n workers have measured."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
        *(str(n), "-m", "fusestep.bench.scale_out.worker"),
        *map(str, arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = machine.output(command, f"--processes {n}", env=environment, timeout=_TIMEOUT)
    return json.loads(printed.splitlines()[-1])


def _pooled(n: int, length: int) -> dict[str, Any]:
    every = _started(n, "pooled", DIM, POOLED, length)
    slowest = max(own["iteration"] for own in every)
    sent, exchanges = sum(own["sent"] for own in every), every[0]["exchanges"]
    return {
        "processes": n, "length": length, "sent": sent, "exchanges": exchanges,
        "iteration": slowest,
    }  # fmt: skip


def _run(n: int, rows: int, batch: int, time: float) -> dict[str, Any]:
    """Figures of n processes: the slowest of each, and the bytes of all."""
    every = _started(n, rows, DIM, batch, time)
    highest = {name: max(own[name] for own in every) for name in every[0] if name != "iteration"}
    totals = {name: sum(own[name] for own in every) for name in ("sent", "least", "ids")}
    slowest = max((own["iteration"] for own in every), key=lambda times: float(times[1]))
    return {"processes": n, "batch": batch, **highest, **totals, "iteration": slowest}


# -- the model ------------------------------------------------------------------------------------


def alone(ids: float, data: dict[str, Any]) -> float:
    """Seconds of an iteration of a process without others, for so many ids of its batch.

    From one process with the whole batch and with a quarter of it.
    """
    part, whole = (run for run in data["runs"] if run["processes"] == 1)
    first, last = (float(run["iteration"][1]) for run in (part, whole))
    of_id = (last - first) / (whole["batch"] - part["batch"])
    return float(last - of_id * whole["batch"] + of_id * ids)


def bytes_sent(n: int, batch: int, rows: int) -> float:
    """Bytes that each of n processes sends to the others in an iteration.

    Numbers of different rows, those rows, and for each id its gradient, the place of its row and
    its own place.
    """
    ids = batch // n
    different = len(np.unique(draw(DEFAULT, rows, ids)))
    return (n - 1) / n * (different * (4 + _ROW) + ids * (_ROW + 8))


def predicted(run: dict[str, Any], data: dict[str, Any]) -> float:
    """The iteration of a run on this machine, whose cores its processes share."""
    n, cores = run["processes"], data["machine"]["cores"]
    own: float = alone(run["batch"] / n, data) * max(1.0, n / cores)
    sent = bytes_sent(n, run["batch"], data["rows"]) * float(run["second_per_byte"])
    return own + float(run["exchanges"] * run["agreement"]) + sent


def iteration(n: int, network: float, data: dict[str, Any]) -> float:
    """An iteration of n processes on machines of their own, with a network of so many Gbit/s."""
    exchanges = float(data["runs"][-1]["exchanges"])
    sent = bytes_sent(n, MODEL_BATCH, data["rows"]) * 8 / (network * 1e9)
    return alone(MODEL_BATCH / n, data) + exchanges * (n - 1) * _MESSAGE + sent


# -- the tables -----------------------------------------------------------------------------------


def measured(data: dict[str, Any]) -> Table:
    """The runs on this machine."""
    head = [
        *("processes", "ids", "iteration", "predicted", "outside of exchanges", "sent"),
        *("of the least", "table and states of a process"),
    ]
    rows = []
    for run in data["runs"]:
        is_several = run["processes"] > 1  # the model begins with the others
        least = f"{run['sent'] / run['least']:.2f}" if is_several else "n/a"
        rows.append([
            str(run["processes"]), f"{run['batch']:,}", seconds(run["iteration"][1]),
            seconds(predicted(run, data)) if is_several else "n/a",
            seconds(run["outside"]), memory(run["sent"]), least,
            memory(run["table_and_states"]),
        ])  # fmt: skip
    return Table(head, rows, left=0)


def pooled(data: dict[str, Any]) -> Table:
    """What bags of the growing tables of a click log send, beside two other ways.

    A dense all-reduce sends all gradients around a ring. Tables cut by rows, as torchrec's, send
    each id (8 bytes) to its owner, partial sums of all bags back, and gradients of all bags to all
    owners. Both are counted, not run.
    """
    tables, rows = [n for n, _ in click_log_tables()], []
    for run in data["pooled"]:
        n, columns = run["processes"], len(tables) * DIM
        dense = 2 * (n - 1) * sum(tables) * _ROW
        ids = len(tables) * POOLED * run["length"] * 8 * (n - 1) / n
        by_rows = ids + 2 * (n - 1) * POOLED * columns * 4
        rows.append([
            str(n), str(run["length"]), seconds(run["iteration"]), f"{run['exchanges']:.0f}",
            *map(memory, (run["sent"], by_rows, dense)),
        ])  # fmt: skip
    head = ["processes", "ids of a bag", "iteration", "exchanges", "sent", "cut by rows", "dense"]
    return Table(head, rows, left=0)


def modelled(data: dict[str, Any]) -> Table:
    """The model, and where it is shortest, in bold."""
    times = {g: [iteration(n, g, data) for n in SIZES] for g in NETWORKS}
    rows = []
    for k, n in enumerate(SIZES):
        found = [seconds(times[g][k]) for g in NETWORKS]
        best = [bold(text, when=times[g][k] == min(times[g]))
                for g, text in zip(NETWORKS, found, strict=True)]  # fmt: skip
        sent = round(bytes_sent(n, MODEL_BATCH, data["rows"]))
        rows.append([str(n), memory(sent), *best])
    head = ["processes", "a process sends", *(f"{g} Gbit/s" for g in NETWORKS)]
    return Table(head, rows, left=0)
