#!/usr/bin/env bash
# Tests and benchmark on a CUDA device; see usage below.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bench/gpu.sh [cuda12 | cuda13] [POINT ...]

Makes a virtual environment with numba-cuda for that version of CUDA (default: cuda13), runs the
tests that need a device, some of them again under compute-sanitizer where that is on the PATH, and
the benchmark, all points or those named (such as 'dense/*'). The results go to
bench/results/<name of the device>.json.

  FUSESTEP_GPU_PYTHON=python3   use this Python as it is, without the network: it must have
                                numba-cuda, pytest, and what the benchmark needs
  FUSESTEP_GPU_WITH='torch'     further packages to install, such as torch or cupy-cuda13x
  FUSESTEP_GPU_LARGE_TESTS=1    also the tests that need tens of gigabytes on the device

Exits with the status of the first part that failed; the parts after it are run all the same.
TEXT
}

extra=cuda13
case "${1:-}" in
    -h | --help)
        usage
        exit 0
        ;;
    cuda12 | cuda13)
        extra=$1
        shift
        ;;
    -*)
        usage >&2
        exit 2
        ;;
esac

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$root"

step() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }

if [ -n "${FUSESTEP_GPU_PYTHON:-}" ]; then
    python=$(command -v "$FUSESTEP_GPU_PYTHON")
    ln -s "$root" "$work/fusestep"  # the root of the repository is the package
    export PYTHONPATH="$work${PYTHONPATH:+:$PYTHONPATH}"
else
    step "environment: $extra ${FUSESTEP_GPU_WITH:-}"
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    # Editable, so that the results know the commit. Word splitting is what we want here.
    # shellcheck disable=SC2086
    "$python" -m pip install --quiet -e ".[$extra,test,bench]" ${FUSESTEP_GPU_WITH:-}
fi

# Without the current folder on the path: its folders have common names.
run() { "$python" -P -m "$@"; }

name=$("$python" -P - <<'PYTHON'
import re
import sys

from numba import cuda

if not cuda.is_available():
    sys.exit("bench/gpu.sh: Numba finds no CUDA device")
name = cuda.get_current_device().name
name = name.decode() if isinstance(name, bytes) else name
print(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"))
PYTHON
)

status=0

step "tests on $name"
run pytest -m gpu -p no:cacheprovider --continue-on-collection-errors tests/gpu || status=$?

if sanitizer=$(command -v compute-sanitizer); then
    step "some of them under compute-sanitizer"
    few="numba and (many_tensors_of_all_shapes or row_operators or finite or summed_as_on_the_cpu)"
    "$sanitizer" --error-exitcode 1 --target-processes all \
        "$python" -P -m pytest -q -m gpu -p no:cacheprovider -k "$few" tests/gpu ||
        status=$((status ? status : $?))
fi

step "benchmark"
run fusestep.bench.gpu --json "bench/results/$name.json" "$@" || status=$((status ? status : $?))

step "done: bench/results/$name.json"
exit "$status"
