"""The benchmark on a CUDA device: its report, its script, and points under any driver."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stub
from bench_support import made_up, point, refused_line, result, summary
from devices import LACKS
from fusestep.bench import run
from fusestep.bench.report.result import BOUND, OURS

DEVICE = {
    "name": "NVIDIA Test", "compute_capability": "9.0", "multiprocessors": 132,
    "memory_bytes": 10**11, "cuda_of_driver": "13.0",
}  # fmt: skip
SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"


def test_report_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Ours takes 2 ms, the copy 1 ms; the device has waited for what the host enqueued."""
    found = result(point(), torch_fused=0.003, bound_cuMemcpyDtoD=0.001, **{OURS: 0.002})
    host = {OURS: summary(1e-5), f"{BOUND}cuMemcpyDtoD": summary(2e-6)}
    data = made_up(replace(found, host=host, waited=["torch fused"]), gpu=DEVICE)
    run.terminal.show(data, run.terminal.console())
    text = capsys.readouterr().out
    for expected in ("NVIDIA Test, 100.0 GB, CUDA 13.0", "2.00 ms", "50%", "1.50", "10.0 us"):
        assert expected in text
    assert "dense/nn.Adam 900 fp32 x1: the device waited for the host: torch fused" in text


@pytest.mark.parametrize(("given", "text"), [
    (["--device", "cuda", "--threads", "1"], "--device cuda: takes no --threads"),
    (["--device", "cuda", "--scenario", "busy"], "--device cuda: takes no --scenario"),
    (["--device", "cuda", "--peers", "none"], "--device cuda: takes no --peers"),
    (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    (["device-rows"], "device-rows: is measured on --device cuda only"),
    (["--append"], "--append: needs --json FILE"),
])  # fmt: skip
def test_options_of_a_device(given: list[str], text: str, capsys) -> None:
    assert text in refused_line(capsys, *given)


@pytest.mark.skipif(LACKS == "", reason="there is a CUDA device")
def test_without_a_device_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device: " in refused_line(capsys, "--device", "cuda", "nn.Adam")


# A Python that has four checks: one is right, one wrong, one never ends, and one ends its process.
PYTHON = """#!/bin/bash
case "$*" in
    *--collect-only*) printf 'x::test_check[%s]\\n' dense/SGD/float32 a b c ;;
    *'[a]') echo wrong; exit 1 ;;
    *'[b]') exec sleep 30 ;;
    *'[c]') kill -9 $$ ;;
    *) echo found ;;
esac
"""


def test_a_second_run_of_the_script_does_what_is_left(tmp_path: Path) -> None:
    python, folder = tmp_path / "python", tmp_path / "found"

    def lines(
        *options: str, program: str = PYTHON, to: Path = folder
    ) -> tuple[int, list[list[str]]]:
        python.write_text(program, encoding="utf-8")
        python.chmod(0o755)
        path = f"/usr/bin:/bin:{os.environ['PATH']}"
        done = subprocess.run(
            [SCRIPT, to, "--no-sanitizer", "--no-bench", *options],
            env={**os.environ, "FUSESTEP_GPU_PYTHON": str(python), "PATH": path},
            capture_output=True, text=True, check=False)  # fmt: skip
        found = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
        return done.returncode, sorted([verdict, name] for verdict, _, name, _ in found)

    status, found = lines("--seconds", "8")
    assert status == 1
    assert [one for one in found if one[1] != "nvidia-smi"] == [
        ["failed with 1", "a"], ["right", "dense/SGD/float32"], ["right", "info"],
        ["stopped", "b"], ["stopped", "c"],
    ]  # fmt: skip
    status, found = lines("--seconds", "60", program=PYTHON.replace("exec sleep 30", "echo b"))
    assert status == 1
    assert found == [["failed with 1", "a"], ["right", "b"], ["stopped", "c"]]
    assert lines("--seconds", "2") == (0, [])  # no time is left for anything
    assert "wrong" in (folder / "log" / "a").read_text(encoding="utf-8")
    status, found = lines(program="#!/bin/bash\nexit 9\n", to=tmp_path / "others")
    assert status == 2  # no kernel runs
    assert ["failed with 9", "dense/SGD/float32"] in found


POINTS = [
    *("dense/nn.Adam", "rows/nn.LazyAdam", "rows/nn.torch.LazyAdam", "dense/nn.AdaFactor"),
    *("pooled/nn.EmbeddingBags", "pooled/nn.EmbeddingBags(LazyAdam)", "many-small/nn.Adam"),
    *("rows/ops.FusedSparseAdam", "dense/nn.Lamb"),
]
SMALL_ROWS = """
import sys
from fusestep.__main__ import main
from fusestep.bench.special import device_rows
device_rows.ROWS, device_rows.WIDTH, device_rows.BATCH = 1 << 12, 32, 5_000
device_rows.SORTED, device_rows._SECONDS = (10_000,), 0.05
sys.exit(main(["bench", *sys.argv[1:]]))
"""


@pytest.mark.gpu
@pytest.mark.skipif(LACKS != "" and stub.lacks() != "", reason=stub.lacks())
def test_small_points(tmp_path: Path) -> None:
    """The times mean nothing; on the driver without a device they are times of launches."""
    environment = stub.environment(stub.build(tmp_path)) if LACKS else dict(os.environ)
    path = tmp_path / "x.json"
    common = "--device", "cuda", "--seconds", "0.05", "--json", str(path), "--append"
    given = "--size", "64K,4Kx32x5K,3x50x16x100x3"
    for names in ([*POINTS, *given], ["device-rows"], ["dense/nn.Adam", "--size", "32K"]):
        command = [sys.executable, "-c", SMALL_ROWS, *common, *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    measured = {one["case"]: one for one in data["points"] if OURS in one["times"]}
    assert measured.keys() | {"rows/nn.torch.LazyAdam"} == {*POINTS}
    assert len(data["points"]) == len(POINTS) + 1
    for one in measured.values():
        assert {OURS, f"{BOUND}cuMemcpyDtoD"} <= one["times"].keys() == one["host"].keys()
    (rows,) = data["special"]
    assert {"zipf1.2: grouping alone", "sort of 10,000 keys: fusestep"} <= rows["times"].keys()
    assert data["gpu"]["memory_bytes"] > 0
