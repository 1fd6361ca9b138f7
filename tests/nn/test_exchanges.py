"""A thread that drops or replaces arrays while another one steps: memory, and what is lost."""

import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from fusestep import nn
from fusestep.nn.engine import reader
from helpers import sampled

# `exchange` gives one thread's arrays up for others while the main thread steps. Whatever is freed
# is taken at once by arrays of 1e30, which nobody may write and which no step may read.
PROGRAM = """
import os, sys, threading, time
import numpy as np
import fusestep
from fusestep import nn
from fusestep.nn import mxnet as mx

fusestep.set_num_threads(2)
what, n = sys.argv[1], int(sys.argv[2])
saved = None
w, stop, steps = nn.Parameter(np.zeros((n, 8), np.float32)), [], [0]
held = [w.data, np.ones((n, 8), np.float32)]
optimizer, updater = nn.Adam([w], 0.1), mx.Updater(mx.Adam(learning_rate=0.1))
bags = nn.EmbeddingBags([w], optimizer)
ids, out = np.arange(n).reshape(n, 1), np.ones((n, 8), np.float32)

def fresh(x=0.0):
    return np.full((n, 8), x, np.float32)

def steps_of_bags():
    bags([ids])
    try:
        bags.backward([out])
    except RuntimeError as error:
        assert "rebound" in str(error), error

def exchange():
    w.data = fresh()

def load():
    optimizer.load_state_dict({k: x.copy() for k, x in optimizer.state_dict().items()})

def replace():
    updater.states = {}

def assign():
    updater.states[0] = fresh(), fresh()

step, change = {
    "parameter": (lambda: optimizer((out,)), exchange),
    "gradient": (lambda: optimizer((held[1],)), lambda: held.__setitem__(1, fresh(1.0))),
    "loading": (lambda: optimizer((out,)), load),
    "states": (lambda: updater(0, out, held[0]), replace),
    "a state": (lambda: updater(0, out, held[0]), lambda: updater.states.pop(0, None)),
    "other states": (lambda: updater(0, out, held[0]), assign),
    "read states": (lambda: updater(0, out, held[0]), lambda: saved and updater.set_states(saved)),
    "weight": (lambda: updater(0, out, held[0]), lambda: held.__setitem__(0, fresh())),
    "table": (steps_of_bags, exchange),
}[what]
for _ in range(3):  # compiles
    step()
    change()
saved = updater.get_states()

def go_on():
    while not stop:
        change()
        others = [fresh(1e30) for _ in range(3)]
        before, last = steps[0], time.time()
        while not stop and steps[0] < before + 3:
            time.sleep(0.0001)
            if time.time() > last + 20:
                print("no step any more", flush=True)
                os._exit(1)
        if not all((x == np.float32(1e30)).all() for x in others):
            print("memory of others was written", flush=True)
            os._exit(1)
        # Three steps have begun after the exchange, so two of them with what is there now.
        if what in ("parameter", "table") and not stop and not (w.data < 0).all():
            print("steps go to an array that is not the parameter's any more", flush=True)
            os._exit(1)

thread = threading.Thread(target=go_on)
thread.start()
end = time.time() + 2
try:
    while time.time() < end:
        step()
        steps[0] += 1
finally:
    stop.append(1)
    thread.join()
values = held[0] if what in ("states", "a state", "other states", "weight") else w.data
assert np.isfinite(values).all() and abs(values).max() < 1e5, values
assert steps[0] > 5
"""


WHAT = (
    "parameter", "gradient", "loading", "states", "a state", "other states", "read states",
    "weight", "table")  # fmt: skip
SIZES = (2, 50_000)
SAMPLE = [(what, SIZES[k % 2]) for k, what in enumerate(WHAT)]


@pytest.mark.parametrize(("what", "n"), sampled(product(WHAT, SIZES), SAMPLE))
def test_a_thread_exchanges_arrays_while_another_one_steps(what: str, n: int) -> None:
    command = [sys.executable, "-c", PROGRAM, what, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-1500:]


@pytest.mark.parametrize("complete", [True, False])
def test_a_parameter_is_rebound_while_a_step_reads(complete: bool, monkeypatch: Any) -> None:
    """What this step has found of the array of before is none of the next one's."""
    w, b = nn.Parameter(np.zeros(3, np.float32)), nn.Parameter(np.zeros(2, np.float32))
    optimizer, build = nn.SGD([w, b], learning_rate=0.5), reader.build_layout
    given = np.ones(3, np.float32), np.ones(2, np.float32) if complete else None
    before, after = w.data, np.full(3, 7.0, np.float32)

    def rebind(*arguments: Any) -> Any:
        layout = build(*arguments)
        w.data = after  # by another thread
        return layout

    with monkeypatch.context() as patch:
        patch.setattr(reader, "build_layout", rebind)
        optimizer(given)
    assert (before == -0.5).all() and (w.data == 7.0).all()
    optimizer(given)
    optimizer(given)
    assert (before == -0.5).all() and (w.data == 6.0).all()
