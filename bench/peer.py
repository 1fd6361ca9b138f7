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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .errors import BenchError
from .measure import ContestantLostError

_SCRIPTS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class PeerKind:
    """A library that we are compared with.

    Args:
        modules: what has to be installed in the interpreter that runs its worker.
        script: the worker.
        is_default: it is asked when no peer is named.
        interpreter: the peer whose interpreter it shares; by default it has its own.
    """

    modules: tuple[str, ...]
    script: Path
    is_default: bool = True
    interpreter: str | None = None


PEERS = {
    "numpy": PeerKind(("numpy",), _SCRIPTS / "numpy_worker.py"),
    "torch": PeerKind(("torch",), _SCRIPTS / "torch_worker.py"),
    "torch-compile": PeerKind(
        ("torch",),
        _SCRIPTS / "torch_compile_worker.py",
        is_default=False,
        interpreter="torch",
    ),
    "optax": PeerKind(("jax", "optax"), _SCRIPTS / "optax_worker.py"),
    "mindspore": PeerKind(("mindspore",), _SCRIPTS / "mindspore_worker.py"),
    "mxnet": PeerKind(("mxnet",), _SCRIPTS / "mxnet_worker.py"),
    "deepspeed": PeerKind(("torch", "deepspeed"), _SCRIPTS / "deepspeed_worker.py"),
    "fbgemm": PeerKind(("torch", "fbgemm_gpu"), _SCRIPTS / "fbgemm_worker.py"),
}
_CAN_STOP = hasattr(signal, "SIGSTOP")
_TIMEOUT = 600.0  # compiling may take minutes


def interpreter_option(peer: str) -> str:
    """The option that names the interpreter of a peer."""
    return f"--{PEERS[peer].interpreter or peer}-python"


def find_python(peer: str, option: str | None) -> str | None:
    """The interpreter that has the peer: the one named by the user, or this one, or None.

    Raises:
        BenchError: the user named something that is no program.
    """
    if option is None:
        here = all(find_spec(module) is not None for module in PEERS[peer].modules)
        return sys.executable if here else None
    if not (os.path.isfile(option) and os.access(option, os.X_OK)):
        raise BenchError(f"{interpreter_option(peer)}: {option!r} is no Python interpreter")
    return option


class Worker:
    """A resident process that takes one step of its library per request.

    While it is not asked, it is stopped by a signal, so its threads cannot disturb the others;
    where there are no such signals, it is told to wait passively.

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
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        try:
            self._process = subprocess.Popen(
                [python, *program, str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(python, threads, path),
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

    @property
    def is_broken(self) -> bool:
        """It has ended or does not answer any more."""
        return self._broken is not None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        if self._broken is not None:
            raise ContestantLostError(self._broken)
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


def _environment(python: str, threads: int, path: Path | None) -> dict[str, str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "GLOG_v": "3",  # MindSpore's warnings
    }
    environment.pop("PYTHONSAFEPATH", None)  # a worker imports its neighbours
    if not _CAN_STOP:
        environment |= {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    elif python != sys.executable:
        environment.pop("PYTHONPATH", None)  # it names packages of this interpreter
    return environment


class Peers:
    """The workers of a run, each started when it is first needed.

    Args:
        pythons: the interpreter of each peer that was asked for; None when there is none.

    Attributes:
        versions: of the libraries of the workers that were started.
        missing: why a peer cannot take part.
    """

    def __init__(self, pythons: dict[str, str | None]) -> None:
        self._pythons = pythons
        self._workers: dict[tuple[str, int], Worker] = {}
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Of the peers that were asked for."""
        return list(self._pythons)

    def worker(self, peer: str, threads: int) -> Worker | None:
        """A running worker; None, with a reason in ``missing``, when there is none.

        One that has died, of one point's size say, is started again for the next point.
        """
        old = self._workers.get((peer, threads))
        if old is not None and old.is_broken:
            old.close()
            del self._workers[peer, threads]
        if peer not in self.missing and (peer, threads) not in self._workers:
            python = self._pythons[peer]
            if python is None:
                self.missing[peer] = (
                    f"not installed here; name its Python with {interpreter_option(peer)}"
                )
            else:
                self._start(peer, python, threads)
        return None if peer in self.missing else self._workers[peer, threads]

    def _start(self, peer: str, python: str, threads: int) -> None:
        try:
            worker = Worker([str(PEERS[peer].script)], python, threads)
        except ContestantLostError as error:
            self.missing[peer] = str(error)
            return
        self._workers[peer, threads] = worker
        self.versions[peer] = worker.version

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


@contextlib.contextmanager
def peers_of(pythons: dict[str, str | None]) -> Iterator[Peers]:
    """The peers of a run, ended with it."""
    peers = Peers(pythons)
    try:
        yield peers
    finally:
        peers.close()
