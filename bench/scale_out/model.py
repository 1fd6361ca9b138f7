"""What an iteration costs with more processes, from what it costs here; and the tables of both."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..cases.indices import DEFAULT, draw
from ..report.catalogue import markdown
from ..report.table import memory, seconds

DIM = 64
NETWORKS = (10, 100, 400)  # Gbit/s
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # processes of the model
MODEL_BATCH = 1 << 20  # ids of the batch of all processes
_ROW = 4 * DIM  # bytes
_MESSAGE = 5e-6  # seconds that a process takes for each message of a fast network, assumed


class Costs(NamedTuple):
    """What an iteration costs a process without others, in seconds."""

    fixed: float
    of_id: float

    def at(self, ids: float) -> float:
        """For so many ids of its part of the batch."""
        return float(self.fixed + self.of_id * ids)


def costs(data: dict[str, Any]) -> Costs:
    """From one process with the whole batch and with a quarter of it."""
    part, whole = (run for run in data["runs"] if run["processes"] == 1)
    first, last = (float(run["iteration"][1]) for run in (part, whole))
    of_id = (last - first) / (whole["batch"] - part["batch"])
    return Costs(last - of_id * whole["batch"], of_id)


def bytes_sent(n: int, batch: int, rows: int) -> float:
    """What each of n processes sends to the others in an iteration, in bytes.

    Numbers of different rows, those rows, and for each id its gradient, the place of its row and
    its own place.
    """
    ids = batch // n
    different = len(np.unique(draw(DEFAULT, rows, ids)))
    return (n - 1) / n * (different * (4 + _ROW) + ids * (_ROW + 8))


def predicted(run: dict[str, Any], data: dict[str, Any]) -> float:
    """The iteration of a run on this machine, whose cores its processes share."""
    n, cores = run["processes"], data["machine"]["cores"]
    own: float = costs(data).at(run["batch"] / n) * max(1.0, n / cores)
    sent = bytes_sent(n, run["batch"], data["rows"]) * float(run["second_per_byte"])
    return own + float(run["exchanges"] * run["agreement"]) + sent


def iteration(n: int, network: float, data: dict[str, Any]) -> float:
    """Of n processes on machines of their own, with a network of so many Gbit/s."""
    exchanges = float(data["runs"][-1]["exchanges"])
    sent = bytes_sent(n, MODEL_BATCH, data["rows"]) * 8 / (network * 1e9)
    return costs(data).at(MODEL_BATCH / n) + exchanges * (n - 1) * _MESSAGE + sent


# The tables


def measured(data: dict[str, Any]) -> str:
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
    return markdown(head, rows, left=0)


def modelled(data: dict[str, Any]) -> str:
    """The model, and where it is shortest, in bold."""
    times = {g: [iteration(n, g, data) for n in SIZES] for g in NETWORKS}
    rows = []
    for k, n in enumerate(SIZES):
        found = [seconds(times[g][k]) for g in NETWORKS]
        best = [f"**{text}**" if times[g][k] == min(times[g]) else text
                for g, text in zip(NETWORKS, found, strict=True)]  # fmt: skip
        sent = round(bytes_sent(n, MODEL_BATCH, data["rows"]))
        rows.append([str(n), memory(sent), *best])
    head = ["processes", "a process sends", *(f"{g} Gbit/s" for g in NETWORKS)]
    return markdown(head, rows, left=0)
