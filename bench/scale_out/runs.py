"""Iterations on a table that several processes of this machine own.

``fusestep bench --processes 1,2,4`` starts that many processes on this machine, one thread each,
over gloo. Beside the whole batch one process takes a quarter of it: from these two runs follows
what an iteration costs without others, and the runs with more processes check the model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import machine
from ..errors import BenchError
from ..report import document, table
from ..report.table import console
from .model import DIM, measured

ROWS, BATCH = 500_000, 65_536
_QUICK_ROWS, _QUICK_BATCH = 20_000, 4_096
_SECONDS, _QUICK_SECONDS = 3.0, 1.0  # of a run
_MOST = 64  # processes on one machine
_TIMEOUT = 600.0


def main(args: argparse.Namespace) -> int:
    """Measure, print, and write ``--json``.

    Raises:
        BenchError: an option is wrong, or a run fails.
    """
    taken = ("processes", "json", "seconds", "quick")
    given = {name for name, value in vars(args).items() if value not in (None, False, [])}
    if others := sorted(given.difference(taken)):
        names = {"cases": "cases", "earlier": "--from"}
        option = names.get(others[0], f"--{others[0].replace('_', '-')}")
        raise BenchError(f"--processes: takes no {option}")
    if find_spec("torch") is None:
        raise BenchError("--processes: needs PyTorch, for gloo: pip install torch")
    counts = _counts(args.processes)
    path = None if args.json is None else Path(args.json)
    if path is not None:
        document.check_writable(path)
    rows, batch = (_QUICK_ROWS, _QUICK_BATCH) if args.quick else (ROWS, BATCH)
    from ..cases.options import parse_seconds

    asked = parse_seconds(args.seconds, quick=args.quick)
    time = asked if args.seconds is not None else _QUICK_SECONDS if args.quick else _SECONDS
    with table.progress() as reports:
        runs = []
        wanted = [(1, batch // 4), *((n, batch) for n in counts)]
        for k, (n, of_run) in enumerate(wanted):
            reports(f"{n} processes, {of_run:,} ids", k, len(wanted))(0.0)
            runs.append(_run(n, rows, of_run, time))
    data = {"machine": machine.machine(), "rows": rows, "dim": DIM, "runs": runs}
    screen = console()
    screen.print(measured(data), highlight=False)
    if path is not None:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


def _counts(text: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(1 <= count <= _MOST for count in counts):
        raise BenchError(f"--processes: expected whole numbers from 1 to {_MOST}, got {text!r}")
    return sorted({1, *counts})


def _run(n: int, rows: int, batch: int, time: float) -> dict[str, Any]:
    """What n processes have measured: the slowest of each figure, and the bytes of all."""
    program = ["-m", "fusestep.bench.scale_out.worker"]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(n), *program, str(rows), str(DIM), str(batch), str(time)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=_TIMEOUT
        )
    except subprocess.SubprocessError as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        text = next((line for line in lines if "Error: " in line), lines[-1])
        raise BenchError(f"--processes {n}: {text}") from error
    every = json.loads(done.stdout.strip().splitlines()[-1])
    highest = {name: max(own[name] for own in every) for name in every[0] if name != "iteration"}
    totals = {name: sum(own[name] for own in every) for name in ("sent", "least", "ids")}
    slowest = max((own["iteration"] for own in every), key=lambda times: float(times[1]))
    return {"processes": n, "batch": batch, **highest, **totals, "iteration": slowest}
