"""The benchmark on a CUDA device: its report without one, and small points on one."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fusestep.bench.gpu import __main__ as gpu
from fusestep.bench.gpu import checks, first_run
from fusestep.bench.gpu import point as gpu_point
from fusestep.bench.report import terminal
from fusestep.bench.report.result import BOUND, OURS
from fusestep.bench.report.stats import Summary

from devices import GPU, KIND, LACKS

DEVICE = {
    "name": "NVIDIA Test",
    "compute_capability": "9.0",
    "multiprocessors": 132,
    "memory_bytes": 10**11,
    "cuda_of_driver": "13.0",
}


class FakeBench:
    """What the report reads of a run."""

    seconds = 1.5

    class copies:
        n_bytes = 1 << 31


def a_point() -> gpu_point.Point:
    """Ours takes 2 ms for 4 GB, torch 3 ms, the copy of 2 GB 1 ms."""
    times = {OURS: 2e-3, gpu_point.TORCH: 3e-3, f"{BOUND}cuMemcpyDtoD": 1e-3}
    device = {label: Summary(t, 0.9 * t, 1.1 * t, 9) for label, t in times.items()}
    host = {label: Summary(1e-5, 9e-6, 2e-5, 9) for label in times}
    moved = {OURS: 4 * 10**9, gpu_point.TORCH: 4 * 10**9}
    ahead = {**{label: [True] for label in times}, gpu_point.TORCH: [True, False]}
    notes = ["7 elements instead of 8"]
    return gpu_point.point("dense/x", {"elements": 7}, moved, (device, host), ahead, 4e12, notes)


def test_report_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu", lambda: DEVICE)
    bench: Any = FakeBench
    data = json.loads(json.dumps(gpu.results([a_point()], bench)))
    (point,) = data["points"]
    assert point["of_copy"] == {OURS: pytest.approx(0.5), gpu_point.TORCH: pytest.approx(1 / 3)}
    assert point["by_ours"][gpu_point.TORCH]["value"] == pytest.approx(1.5)
    assert point["ahead"][gpu_point.TORCH] == 0.5
    console = Console(width=160, file=io.StringIO())
    terminal.show_gpu(data, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in ("NVIDIA Test", "2.00 ms", "50%", "1.50", "10.0 us", "4000 GB/s"):
        assert expected in text
    assert "the device waited for the host: torch fused; 7 elements instead of 8" in text


def test_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list", "rows/*"]) == 0
    assert capsys.readouterr().out.split() == [
        f"rows/{kind}/{name}" for kind in ("all", "lazy") for name in gpu_point.DISTRIBUTIONS
    ]
    assert gpu.main(["nothing"]) == 2
    assert "no point is called nothing" in capsys.readouterr().err


def test_checks_find_what_is_wrong() -> None:
    """Of a result some elements are known, and the sums of blocks of the others."""
    name = "dense/SGD/float32"
    results = checks.CHECKS[name][0](checks.Host())
    assert checks.compare(name, results)["off"] == 0
    for place, change in (((0, 0), 1e-3), ((100, 33), 1.0), ((256, 63), np.nan)):
        changed = [array.copy() for array in results]
        changed[0][place] += np.float32(change)
        found = checks.compare(name, changed)
        assert found["off"] > 1, place
        assert found["wrong"] >= 1
    assert checks.compare(name, [*results, results[0]])["off"] is None
    bits = "rows/LazyAdam/bfloat16", "sort/2048", "bad index"
    for name in bits:
        assert checks.compare(name, checks.CHECKS[name][0](checks.Host()))["is_same"], name
    assert checks.KNOWN.stat().st_size < 1 << 20


def test_a_second_run_does_what_is_left(tmp_path: Path) -> None:
    run = first_run.Run(tmp_path, 60.0)
    parts = {
        "a": [sys.executable, "-c", "print('found')"],
        "b": [sys.executable, "-c", f"import sys; sys.exit({checks.WRONG})"],
        "c": [sys.executable, "-c", f"import sys; sys.exit({checks.NOT_COMPUTED})"],
        "d": [sys.executable, "-c", "import time; time.sleep(30)"],
    }
    run.side_by_side(parts, 4.0)
    assert sorted(run.failed) == ["b", "d"]
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    verdicts = {found["name"]: found["verdict"] for found in map(json.loads, lines)}
    assert verdicts == {"a": "right", "b": "wrong", "c": "not computed", "d": "stopped after 4 s"}
    again = first_run.Run(tmp_path, 60.0)
    assert [name for name in parts if again.is_due(name)] == ["b", "d"]
    assert first_run.Run(tmp_path, 4.0).start("a", parts["a"], 4.0) is None  # no time is left


@pytest.mark.skipif(LACKS == "", reason="there is a CUDA device")
def test_without_a_device_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert capsys.readouterr().err.startswith("fusestep bench: ")


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(KIND != GPU, reason=LACKS or "needs a CUDA device")
def test_small_points_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every point; the times mean nothing."""
    from fusestep.bench.gpu import points as gpu_points

    sizes = {
        gpu_points: {"ROWS": 1 << 12, "WIDTH": 32, "BATCH": 5_000},
        gpu_point: {"COPY_BYTES": 1 << 22, "LARGE": (1 << 16,), "SORTED": (10_000,)},
    }
    for module, values in sizes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    path = tmp_path / "x.json"
    assert gpu.main(["--seconds", "0.05", "--json", str(path)]) == 0
    data = json.loads(path.read_text(encoding="utf-8"))
    assert len(data["points"]) == len(gpu_point.named_points())
    assert all(min(point["ahead"].values()) >= 0.0 for point in data["points"])
