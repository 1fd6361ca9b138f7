"""Type checkers see the signatures of `fusestep.nn.torch`."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import fusestep

pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")

# Lines with a comment are errors, of the kind that it names; the others are none.
CALLS = """
import torch
from fusestep.nn import torch as fused
from fusestep.nn.torch import *

w = torch.nn.Parameter(torch.ones(3))
torch.optim.AdamW([w], nesterov=True)  # call-arg
fused.AdamW([w], nesterov=True)  # call-arg
fused.AdamW([w], lr="0.1")  # arg-type
fused.AdamW([w], betas=(0.9, 0.99, 0.9))  # arg-type
fused.AdamW([w], sparse="toched")  # arg-type
fused.AdamW([w], state_dtype="float32")  # arg-type
fused.Lamb([w], sparse="all")  # call-arg
fused.RowWiseAdagrad([w], state_dtype=torch.float32)  # call-arg
fused.SparseAdam([w], eps_hat=True)  # call-arg
fused.LBFGS([w], momentum=0.9)  # call-arg
fused.Adma  # attr-defined
AdamW([w], nesterov=True)  # call-arg
fused.Adam([w]).stepp()  # attr-defined
fused.clip_grad_value_([w], 1.0, 2.0)  # arg-type
fused.clip_grad_norm_([w], 1.0, optimizer=torch.optim.SGD([w]))  # arg-type

optimizer = fused.AdamW([w], 1e-3, (0.9, 0.99), eps=1e-6, amsgrad=True, fused=True,
                        eps_hat=True, sparse="touched", state_dtype=torch.float32)
fused.SGD([{"params": [w], "lr": 0.1}], torch.tensor(0.1), momentum=0.9, nesterov=True)
fused.SGD([("w", w)], maximize=True, skip_nonfinite=True)
fused.Adafactor([w], eps=(None, 1e-3))
fused.Prodigy([w], beta3=None)
fused.Thor(torch.nn.Linear(2, 1), 0.1)
fused.lr_scheduler.StepLR(optimizer, 1)
optimizer.step(param=w)
any_of_them: fused.Optimizer = optimizer
norm: torch.Tensor = fused.clip_grad_norm_([w], 1.0, torch.inf, optimizer=[optimizer])
LBFGS([w], history_size=3)


class Steep(fused.FusedOptimizer, torch.optim.SGD):
    pass
"""


def test_right_and_wrong_calls(tmp_path: Path) -> None:
    # The root of a clone is the package, under any name: a link has the name that it is found by.
    (tmp_path / "fusestep").symlink_to(Path(fusestep.__file__).parent)
    program = tmp_path / "program.py"
    program.write_text(CALLS, encoding="utf-8")
    options = (
        "--follow-imports=silent", "--no-color-output", "--no-error-summary",
        "--hide-error-context")  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--cache-dir", str(tmp_path / "cache"), program],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(tmp_path)})  # fmt: skip
    assert result.stderr == ""
    found = re.findall(r"^program\.py:(\d+): error: .*\[([\w-]+)\]$", result.stdout, re.M)
    lines = enumerate(CALLS.splitlines(), 1)
    expected = [(str(k), line.rpartition("# ")[2]) for k, line in lines if "  # " in line]
    assert found == expected, result.stdout
