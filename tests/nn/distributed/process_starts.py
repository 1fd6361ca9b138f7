"""Start a program in several processes of this machine: by torchrun, by mpiexec, by nobody."""

import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from subprocesses import ENVIRONMENT

TIMEOUT = 240  # seconds: nothing here takes a tenth of it
# Each process has its share of the cores at best, and waits for others most of the time.
_ENVIRONMENT = {
    **ENVIRONMENT, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONFAULTHANDLER": "1",
}  # fmt: skip
_SCRIPTS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
MPIEXEC = shutil.which("mpiexec", path=_SCRIPTS)


def _has_gloo() -> bool:
    if find_spec("torch") is None:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_gloo_available()


needs_torch = pytest.mark.skipif(not _has_gloo(), reason="needs torch.distributed with gloo")
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or find_spec("mpi4py") is None, reason="needs mpi4py and mpiexec"
)
ENGINES = [pytest.param("torch", marks=needs_torch), pytest.param("mpi", marks=needs_mpi)]


def command(engine: str, size: int, program: Path, *arguments: object) -> list[str]:
    """What starts a program by the launcher of an engine."""
    rest = [str(program), engine, *map(str, arguments)]
    if engine == "mpi":
        return [str(MPIEXEC), "-n", str(size), sys.executable, "-m", "mpi4py", *rest]
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return [sys.executable, *agent, *rest]


def start(
    engine: str, size: int, program: Path, *arguments: object, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """The completed processes; what they wrote is together."""
    return subprocess.run(
        command(engine, size, program, *arguments),
        env=_ENVIRONMENT, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=TIMEOUT, check=False)  # fmt: skip


def start_job(
    engine: str, size: int, program: Path, *arguments: object, cwd: Path
) -> subprocess.Popen[str]:
    """The launcher, in a process group of its own, with all that it starts."""
    return subprocess.Popen(
        command(engine, size, program, *arguments), env=_ENVIRONMENT, cwd=cwd,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def start_each(
    size: int, program: Path, *arguments: object, cwd: Path
) -> list[subprocess.Popen[str]]:
    """Processes that nobody looks after: rank 0 keeps the store of the group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    return [
        subprocess.Popen(
            [sys.executable, str(program), "torch", *map(str, arguments)],
            env={**_ENVIRONMENT, **group, "RANK": str(rank)},
            cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(size)
    ]  # fmt: skip
