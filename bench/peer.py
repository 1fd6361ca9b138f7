"""Our end of the pipe to a worker process of another library."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from .errors import BenchError
from .measure import ContestantLostError
from .workers.worker_protocol import send


@dataclass(frozen=True)
class PeerKind:
    """A library that we are compared with."""

    modules: tuple[str, ...]  # what has to be installed in the interpreter that runs its worker
    program: tuple[str, ...]  # the worker and its arguments
    is_default: bool = True  # it is asked when no peer is named
    # The peer whose interpreter it shares; by default it has its own.
    interpreter: str | None = None


def _kind(worker: str, *modules: str) -> PeerKind:
    return PeerKind(modules, (str(Path(__file__).parent / "workers" / f"{worker}_worker.py"),))


_TORCH = _kind("torch", "torch")
PEERS = {
    "numpy": _kind("numpy", "numpy"),
    "torch": _TORCH,
    "torch-compile": PeerKind(_TORCH.modules, (*_TORCH.program, "compiled"), False, "torch"),
    "optax": _kind("optax", "jax", "optax"),
    "mindspore": _kind("mindspore", "mindspore"),
    "mxnet": _kind("mxnet", "mxnet"),
    "deepspeed": _kind("deepspeed", "torch", "deepspeed"),
    "fbgemm": _kind("fbgemm", "torch", "fbgemm_gpu"),
}
_TIMEOUT = 600.0  # compiling may take minutes


def interpreter_option(peer: str) -> str:
    """The option that names the interpreter of a peer."""
    return f"--{PEERS[peer].interpreter or peer}-python"


def find_python(peer: str, option: str | None) -> str | None:
    """The interpreter that has the peer: the one named by the user, or this one, or None.

    Raises:
        BenchError: the user named something that is no program.
    """
    if option and not (os.path.isfile(option) and os.access(option, os.X_OK)):
        raise BenchError(f"{interpreter_option(peer)}: {option!r} is no Python interpreter")
    here = all(find_spec(module) is not None for module in PEERS[peer].modules)
    return option or (sys.executable if here else None)


class Worker:
    """A resident process that takes one step of its library per request.

    While it is not asked, it is suspended, so its threads cannot disturb the others.

    Args:
        program: the interpreter's arguments for what serves requests
            (`worker_protocol.serve`).
        python: the interpreter.
        threads: that the library may use.
        path: where the interpreter looks for packages first.

    Raises:
        ContestantLostError: from every method, when the worker or its library does not work.
    """

    def __init__(
        self, program: Sequence[str], python: str, threads: int, path: Path | None = None
    ) -> None:
        self._broken: str | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        try:
            self._process = psutil.Popen(
                [python, *program, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(python, threads, path),
            )
        except OSError as error:
            self._errors.close()
            raise ContestantLostError(f"cannot start {python}: {error.strerror}") from error
        try:
            self.version = str(self.ask({"do": "hello"})["version"])
        except BaseException:
            self.close()
            raise

    @property
    def is_broken(self) -> bool:
        """Whether it has ended or does not answer any more."""
        return self._broken is not None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        if self._broken is not None:
            raise ContestantLostError(self._broken)
        with suppress(psutil.NoSuchProcess):
            self._process.resume()
        answer = self._exchange(request)
        with suppress(psutil.NoSuchProcess):
            self._process.suspend()
        if "error" in answer:
            raise ContestantLostError(answer["error"].strip().splitlines()[0])
        return answer

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        timer = threading.Timer(_TIMEOUT, self._process.kill)
        timer.start()
        begin = time.monotonic()
        try:
            send(request, self._process.stdin)
            answer: dict[str, Any] = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:  # the process has ended
            is_late = time.monotonic() - begin >= _TIMEOUT
            late = f"no answer within {_TIMEOUT:.0f} s"
            self._broken = late if is_late else self._last_words()
            raise ContestantLostError(self._broken) from error
        finally:
            timer.cancel()
        return answer

    def _last_words(self) -> str:
        with suppress(psutil.TimeoutExpired):
            self._process.wait(timeout=5)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1] if said else f"the worker ended with status {self._process.poll()}"

    def close(self) -> None:
        """End the process."""
        with suppress(psutil.NoSuchProcess):
            self._process.resume()
        with suppress(OSError, ValueError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=0.5)
        except psutil.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def _environment(python: str, threads: int, path: Path | None) -> dict[str, str]:
    names = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"
    environment = {**os.environ, **dict.fromkeys(names, str(threads))}
    environment["GLOG_v"] = "3"  # MindSpore's warnings
    environment.pop("PYTHONSAFEPATH", None)  # a worker imports its neighbours
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    elif python != sys.executable:
        environment.pop("PYTHONPATH", None)  # it names packages of this interpreter
    return environment


class Peers:
    """The workers of a run, each started when it is first needed.

    Args:
        pythons: the interpreter of each peer that was asked for; None when there is none.
    """

    def __init__(self, pythons: dict[str, str | None]) -> None:
        self.names, self._pythons = list(pythons), pythons
        self._workers: dict[tuple[str, int], Worker] = {}
        self.versions: dict[str, str] = {}  # of the libraries of the workers that were started
        self.missing: dict[str, str] = {}  # why a peer cannot take part

    def worker(self, peer: str, threads: int) -> Worker:
        """A running worker.

        One that has died, of one point's size say, is started again for the next point.

        Raises:
            ContestantLostError: there is none, for the reason in ``missing``.
        """
        found, python = self._workers.get((peer, threads)), self._pythons[peer]
        if python is None:
            text = f"not installed here; name its Python with {interpreter_option(peer)}"
            self.missing[peer] = text
        if peer in self.missing:
            raise ContestantLostError(self.missing[peer])
        if found is not None and not found.is_broken:
            return found
        if found is not None:
            found.close()
        try:
            assert python is not None
            found = self._workers[peer, threads] = Worker(PEERS[peer].program, python, threads)
        except ContestantLostError as error:
            self.missing[peer] = str(error)
            raise
        self.versions[peer] = found.version
        return found

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
