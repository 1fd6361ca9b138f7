"""The driver without a device: built by the compiler that is there, and asked what it was given."""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).parent / "driver.c"
LIBRARY = "libcuda.so.1"


def _headers() -> Path | None:
    """The folder with ``cuda.h``, of the toolkit's wheels."""
    spec = find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    found = [path.parent for place in places for path in Path(place).glob("*/include/cuda.h")]
    return found[0] if found else None


def lacks() -> str:
    """The requirement that is missing to build it or to run under it; "" for none."""
    if find_spec("numba_cuda") is None or _headers() is None:
        return 'needs numba-cuda and CUDA headers: pip install ".[sass]"'
    return "" if shutil.which("cc") else "needs a C compiler"


def build(folder: Path) -> Path:
    """Compile it into a folder; that folder, for `environment`."""
    headers, to = _headers(), folder / LIBRARY
    command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{headers}"]
    subprocess.run([*command, "-o", to, SOURCE, "-ldl", "-lpthread"], check=True)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process to which it is the driver."""
    known = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    return {**known, "LD_LIBRARY_PATH": str(folder)}
