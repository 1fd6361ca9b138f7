"""Our end of the pipe to a worker process of another library."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .errors import BenchError
from .measure import ContestantLostError

_SCRIPTS = Path(__file__).parent / "workers"
PEERS = {
    "torch": _SCRIPTS / "torch_worker.py",
    "mindspore": _SCRIPTS / "mindspore_worker.py",
}
_CAN_STOP = hasattr(signal, "SIGSTOP")
_TIMEOUT = 120.0
# Our own threads spin for a few milliseconds after a parallel loop, in the hope of another one.
_SETTLE = 0.02


def find_python(peer: str, option: str | None) -> str | None:
    """The interpreter that has the peer: the one named by the user, or this one, or None.

    Raises:
        BenchError: the user named something that is no program.
    """
    if option is None:
        return sys.executable if find_spec(peer) is not None else None
    if not (os.path.isfile(option) and os.access(option, os.X_OK)):
        raise BenchError(f"--{peer}-python: {option!r} is no Python interpreter")
    return option


class Worker:
    """A resident process that takes one step of its library per request.

    While it is not asked, it is stopped by a signal, so its threads cannot disturb the others;
    where there are no such signals, it is told to wait passively.

    Raises:
        ContestantLostError: from every method, when the worker or its library does not work.
    """

    def __init__(self, script: Path, python: str, threads: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        try:
            self._process = subprocess.Popen(
                [python, str(script), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(python, threads),
                encoding="utf-8",
            )
        except OSError as error:
            self._errors.close()
            raise ContestantLostError(f"cannot start {python}: {error.strerror}") from error
        self._broken: str | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.version = str(self.ask({"do": "hello"})["version"])
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        if self._broken is not None:
            raise ContestantLostError(self._broken)
        time.sleep(_SETTLE)
        self._signal("SIGCONT")
        line = self._exchange(json.dumps(request))
        self._signal("SIGSTOP")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContestantLostError(answer["error"].strip().splitlines()[0])
        return answer

    def _exchange(self, request: str) -> str:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=_TIMEOUT)
        except OSError:
            line = ""
        except queue.Empty:
            self._process.kill()
            self._broken = f"no answer within {_TIMEOUT:.0f} s"
            raise ContestantLostError(self._broken) from None
        if not line:
            self._broken = self._last_words()
            raise ContestantLostError(self._broken)
        return line

    def _signal(self, name: str) -> None:
        if _CAN_STOP and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(getattr(signal, name))

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1] if said else f"the worker ended with status {self._process.poll()}"

    def close(self) -> None:
        """End the process."""
        self._signal("SIGCONT")
        with contextlib.suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


def _environment(python: str, threads: int) -> dict[str, str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "GLOG_v": "3",  # MindSpore's warnings
    }
    if not _CAN_STOP:
        environment |= {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)  # it names packages of this interpreter
    return environment


class Peers:
    """The workers of a run, each started when it is first needed.

    Args:
        pythons: the interpreter of each peer that was asked for; None when there is none.
        threads: of each worker.
    """

    def __init__(self, pythons: dict[str, str | None], threads: int) -> None:
        self._pythons = pythons
        self._threads = threads
        self._workers: dict[str, Worker] = {}
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def worker(self, peer: str) -> Worker | None:
        """The running worker of a peer; None, with a reason in ``missing``, when there is none."""
        if peer in self._workers or peer in self.missing:
            return self._workers.get(peer)
        python = self._pythons.get(peer)
        if peer not in self._pythons:
            self.missing[peer] = "not asked for"
        elif python is None:
            self.missing[peer] = f"not installed here; name an interpreter with --{peer}-python"
        else:
            try:
                self._workers[peer] = worker = Worker(PEERS[peer], python, self._threads)
                self.versions[peer] = worker.version
            except ContestantLostError as error:
                self.missing[peer] = str(error)
        return self._workers.get(peer)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


@contextlib.contextmanager
def peers_of(pythons: dict[str, str | None], threads: int) -> Iterator[Peers]:
    """The peers of a run, ended with it."""
    peers = Peers(pythons, threads)
    try:
        yield peers
    finally:
        peers.close()
