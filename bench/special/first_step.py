"""How long a user waits: import and first step, each in a fresh process.

Cold: the folder of compiled kernels is new and empty. Cached: it holds what a cold run left.
The import is timed from the first line of the process; the step from there to its end, with
all further imports, the making of the arrays and of the optimizer. What of it is not imports is
given in processor time too.

The parameters are those of a small model: for the dense step a matrix of 512 x 512 and a
vector of 512, for the row step a table of 100,000 x 64 with a batch of 1024 random rows.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict

from .. import machine
from ..report.result import Progress, SpecialResult, tracked

_SCRIPT = """
import json, time
start = time.perf_counter()
import fusestep
imported = time.perf_counter()
import numpy as np
from fusestep import nn
begin = time.process_time()
{step}
end = time.perf_counter()
print(json.dumps([imported - start, end - imported, time.process_time() - begin]))
"""
STEPS = {
    "nn.Adam": """
shapes = ((512, 512), (512,))
optimizer = nn.Adam([np.zeros(shape, np.float32) for shape in shapes])
optimizer([np.ones(shape, np.float32) for shape in shapes])
""",
    "nn.LazyAdam": """
shape, batch = (100_000, 64), 1024
optimizer = nn.LazyAdam([np.zeros(shape, np.float32)])
indices = np.random.default_rng(0).integers(0, shape[0], batch)
optimizer([nn.RowTensor(indices, np.ones((batch, shape[1]), np.float32), shape)])
""",
}
COLD, CACHED = 2, 5
IMPORT, FIRST = 0.6, {"cold": 2.0, "cached": 0.5}  # seconds, median, that they may take


def run(result: SpecialResult, threads: int, progress: Progress) -> None:
    """Measure cold and cached starts in turn."""
    samples: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="fusestep-bench-") as root:
        starts = [("cold", index) for index in range(COLD)] + [("cached", 0)] * CACHED
        todo = [(step, *start) for start in starts for step in STEPS]
        for step, state, index in tracked(todo, progress):
            folder = os.path.join(root, f"{step}-{index}")
            imported, stepped, processor = start(step, folder, threads)
            if state == "cached":  # the files of Python and NumPy are in memory by now
                samples["import"].append(imported)
            samples[f"{step} {state}"].append(stepped)
            samples[f"{step} {state}: processor"].append(processor)
    result.add(samples)
    result.limits["import"] = IMPORT
    result.limits.update({f"{s} {state}": limit for s in STEPS for state, limit in FIRST.items()})


def start(step: str, folder: str, threads: int) -> list[float]:
    """Seconds of the import, from there to the end of the first step, and of the processor.

    In a fresh process, with kernels in ``folder``.

    Raises:
        BenchError: the process failed.
    """
    os.makedirs(folder, exist_ok=True)
    own = {"FUSESTEP_CACHE_DIR": folder, "NUMBA_NUM_THREADS": str(threads)}
    program = [sys.executable, "-c", _SCRIPT.format(step=STEPS[step])]
    failure = f"first-step: a fresh process of {sys.executable} failed"
    printed = machine.output(program, failure, env={**os.environ, **own}, cwd=folder)
    found: list[float] = json.loads(printed.splitlines()[-1])
    return found
