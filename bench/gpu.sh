#!/usr/bin/env bash
# The first ten minutes on a machine with a CUDA device; see usage below.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bench/gpu.sh FOLDER [--wheels FOLDER] [option ...]

Needs a clone, a driver, and a Python with numba-cuda, jsonschema and rich; no network. Tries one
kernel, then checks steps of all kinds against results of the CPU that are in the clone, some of
them under compute-sanitizer, and measures. FOLDER gets results.jsonl and bench.json while it runs;
a second run with the same FOLDER does what the first did not reach. Options are those of
'python -m fusestep.bench.gpu.first_run', which --help lists.

  --wheels FOLDER               wheels of packages that the Python lacks, or has in other versions
  FUSESTEP_GPU_PYTHON=python3   the Python
  CUDA_HOME=/usr/local/cuda     the toolkit, where NVVM is no package of that Python

All tests on the device: pytest -m gpu tests/cuda
TEXT
}

case "${1:-}" in
    -h | --help)
        usage
        exit 0
        ;;
    '' | -*)
        usage >&2
        exit 2
        ;;
esac
folder=$(realpath -m "$1")
shift

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$(command -v "${FUSESTEP_GPU_PYTHON:-python3}")
ln -s "$root" "$work/fusestep" # the root of the repository is the package
export PYTHONPATH="$work${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "${CUDA_HOME:-}" ] && [ -d /usr/local/cuda ]; then
    export CUDA_HOME=/usr/local/cuda
fi
if [ "${1:-}" = --wheels ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" "$2"/*.whl
    export PYTHONPATH="$work/site:$PYTHONPATH"
    shift 2
fi
cd "$work"
"$python" -P -m fusestep.bench.gpu.first_run "$folder" "$@"
