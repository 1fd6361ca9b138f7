#!/usr/bin/env bash
# The first ten minutes on a machine with a CUDA device; see usage below.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bench/gpu.sh FOLDER [--wheels FOLDER] [--seconds S] [--no-sanitizer] [--no-bench]

Needs a clone, a driver, and a Python with numba-cuda, pytest and the packages of fusestep[bench];
no network. Checks steps of all kinds beside those of the CPU, some of them under compute-sanitizer,
and measures, some of it under ncu, where these are; each part in a process of its own. FOLDER gets a line of results.txt and a file of
log/ for each part, and the figures so far in bench.json. A second run with the same FOLDER does
what the first did not reach, and again what failed.

  --wheels FOLDER               wheels of packages that the Python lacks, or has in other versions
  --seconds S                   for all of it (default: 540)
  --no-sanitizer, --no-bench    leave out compute-sanitizer, or what is measured and ncu
  FUSESTEP_GPU_PYTHON=python3   the Python
  CUDA_HOME=/usr/local/cuda     the toolkit, where NVVM is no package of that Python

Exits with 0 if all that was reached is right, with 1 if something failed, with 2 if no kernel runs.
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
seconds=540 sanitizer=$(command -v compute-sanitizer || true) is_measured=yes
while [ $# -gt 0 ]; do
    case "$1" in
        --wheels)
            "$python" -m pip install --quiet --no-index --no-deps --no-compile \
                --target "$work/site" "$2"/*.whl
            export PYTHONPATH="$work/site:$PYTHONPATH"
            shift
            ;;
        --seconds)
            seconds=$2
            shift
            ;;
        --no-sanitizer) sanitizer= ;;
        --no-bench) is_measured= ;;
        *)
            usage >&2
            exit 2
            ;;
    esac
    shift
done
cd "$work"
mkdir -p "$folder/log"
touch "$folder/results.txt"
begin=$(wc -l < "$folder/results.txt")
end=$((SECONDS + seconds))

# part NAME LIMIT COMMAND...: run a part that is due, in as many seconds at most as there are left
part() {
    local name=$1 limit=$2 status=0 verdict log began=$SECONDS left=$((end - SECONDS))
    shift 2
    if grep -q "^right	[0-9]* s	$name	" "$folder/results.txt" || [ "$left" -lt 5 ]; then return; fi
    log="$folder/log/${name//[^A-Za-z0-9.]/_}"
    timeout --kill-after=5 $((limit < left ? limit : left)) "$@" > "$log" 2>&1 || status=$?
    case $status in
        0) verdict=right ;;
        124 | 137) verdict=stopped ;;
        *) verdict="failed with $status" ;;
    esac
    printf '%s\t%s s\t%s\t%s\n' "$verdict" $((SECONDS - began)) "$name" "$(tail -n 1 "$log")" |
        tee -a "$folder/results.txt"
}

# together COMMAND...: run it beside others, not more of them than there are cores
together() {
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n; done
    "$@" &
}

fusestep=("$python" -P -m fusestep)
# check NAME: one of the checks of tests/cuda, as a command
file="$root/tests/cuda/test_device_checks.py"
pytest=("$python" -P -m pytest -q -p no:cacheprovider -o addopts=--import-mode=importlib -rs --rootdir "$root")
check() { command=("${pytest[@]}" "$file::test_check[$1]"); }
cores=$(nproc)
at_once=$((cores > 14 ? 12 : cores > 4 ? cores - 2 : 2))
if smi=$(command -v nvidia-smi); then part nvidia-smi 20 "$smi"; fi
part info 60 "${fusestep[@]}" info
first=dense/SGD/float32
check $first
part $first 90 "${command[@]}"
if ! grep -q "^right.*	$first	" "$folder/results.txt"; then
    echo "no kernel runs here: see $folder/log" >&2
    exit 2
fi

"${pytest[@]}" --collect-only "$file" | sed -n 's/.*::test_check\[\(.*\)\]$/\1/p' > names
while read -r name; do
    check "$name"
    together part "$name" 90 "${command[@]}"
done < names
wait
if [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck synccheck; do
        for name in rows/LazyAdam/sort rows/LazyAdam/hot rows/RowWiseAdagrad/many \
            dense/AdaFactor/bfloat16 bags/LazyAdam; do
            check $name
            together part "$tool $name" 100 "$sanitizer" --error-exitcode 9 --tool $tool "${command[@]}"
        done
    done
    wait
fi

# What is measured, the most important first: cases and options of fusestep bench.
while [ -n "$is_measured" ] && read -r options; do
    # shellcheck disable=SC2086 # several words
    part "bench $options" 90 "${fusestep[@]}" bench --device cuda --seconds 1 \
        --json "$folder/bench.json" --append $options
done <<'POINTS'
dense/nn.Adam dense/nn.torch.Adam --size 64M
rows/nn.LazyAdam rows/nn.torch.LazyAdam --size 1000000x64x8192,1000000x64x131072
gpt2/nn.AdamWeightDecay gpt2/nn.torch.AdamW
pooled/nn.EmbeddingBags pooled/nn.EmbeddingBags(LazyAdam) --size 26x100000x64x2048x20
device-rows
dense/nn.torch.Adam dense/nn.torch.AdamW dense/nn.torch.SGD --size 64M --dtype bfloat16,float16
dense/nn.Adam dense/nn.AdamWeightDecay dense/nn.SGD --size 64M --dtype bfloat16,float16
dense/nn.AdamWeightDecay dense/nn.torch.AdamW dense/nn.SGD dense/nn.torch.SGD --size 64M
rows/nn.LazyAdam rows/nn.torch.LazyAdam --size 1000000x64x131072 --indices uniform
rows/ops.FusedSparseAdam rows/ops.FusedSparseLazyAdam --size 10000000x128x1000000
rows/ops.FusedSparseAdam rows/ops.FusedSparseLazyAdam --size 10000000x128x1000000 --indices zipf1.05
dense/nn.Lamb dense/nn.AdaFactor --size 64M
many-small/nn.Adam many-small/nn.torch.Adam
dense/nn.Adam dense/nn.torch.Adam --size 256M
POINTS
if [ -n "$is_measured" ] && ncu=$(command -v ncu); then
    for options in "dense/nn.Adam --size 64M" "rows/nn.LazyAdam --size 1000000x64x131072"; do
        # shellcheck disable=SC2086 # several words
        part "ncu $options" 90 "$ncu" --target-processes all --launch-skip 20 --launch-count 8 \
            --section SpeedOfLight --section MemoryWorkloadAnalysis --section LaunchStats \
            "${fusestep[@]}" bench --device cuda --seconds 0.2 $options
    done
fi

failed=$(tail -n "+$((begin + 1))" "$folder/results.txt" | grep -vc '^right	' || true)
echo "$failed failed; all is in $folder"
[ "$failed" -eq 0 ]
