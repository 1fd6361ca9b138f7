"""One version of this package as a worker: what ``fusestep bench --against`` runs twice.

``python -m fusestep.bench.version_worker THREADS`` answers the requests of
`worker_protocol`; the algorithms are the names of the cases, each in one form.
"""

from __future__ import annotations

from typing import Any

import numba

from .. import __version__, get_num_threads, set_num_threads
from .buffers import Buffers
from .cases.steps import STEPS
from .cases.subject import DTYPES
from .report.result import OURS
from .workers.worker_protocol import Case, Replica, serve


class Version:
    """This version, on ``threads`` threads."""

    version = __version__

    def __init__(self, threads: int) -> None:
        get_num_threads()  # starts the layer of threads that its steps have
        numba.set_num_threads(threads)
        set_num_threads(threads)
        self._cases = {case.name: case for case in STEPS}

    def forms(self, algorithm: str, kind: str, dtype: str) -> dict[str, Any]:
        """One, of every case that takes the dtype."""
        case = self._cases.get(algorithm)
        takes = case is not None and case.kind == kind and dtype in case.subject.dtypes
        return {OURS: self._replica} if takes else {}

    def _replica(self, case: Case) -> Replica:
        """Buffers of the case of this name."""
        ours = self._cases[case.algorithm]
        buffers = Buffers(ours.subject.prepare, ours.use, DTYPES[case.dtype], case.parameters)
        return Replica(buffers.job(fresh=case.fresh), lambda: buffers.parameters)


if __name__ == "__main__":
    serve(Version)
