"""Tests of the script that compares two trees: `digests.py`."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import digests
from digest_inputs import Given
from digest_record import Record, wrongly
from digest_steps import subjects

CASE = "nn.Momentum() float32 dense"


def digest_of(*values: Any) -> str:
    record = Record()
    record.add(*values)
    return record.digest


@pytest.fixture(scope="module")
def cases() -> Any:
    return digests.all_cases()


def test_every_public_name_has_a_case(cases):
    assert digests.uncovered(cases) == []
    assert digests.uncovered(n for n in cases if not n.startswith("nn.SGD")) == ["nn.SGD"]


EVERY_KIND = [
    *(CASE, "nn.mxnet.Adam() float32 mixed", "nn.thor() float32 layers", "nn.thor layers pickled"),
    *("ops.Adam() float32 sizes", "ops.SparseGatherV2() float16 hot", "nn.save_checkpoint"),
    *("ops.FusedSparseFtrl widths wrongly", "nn.SGD groups wrongly", "nn.SGD bad momentum"),
    *("nn.ExponentialDecayLR wrongly", "ops.EmbeddingBags(mean, padding_idx=2) float32"),
]


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_digest_does_not_depend_on_the_run(cases, name):
    """Nor does the case break off, after which it would tell nothing."""
    found, ending = digests.digest(cases[name])
    assert ending == ""
    assert digests.digest(cases[name])[0] == found


def test_another_rate_is_another_digest(cases):
    def of_rate(rate: float) -> str:
        run = partial(subjects()["Momentum"].run, given=Given("dense"), learning_rate=rate)
        return digests.digest(run)[0]

    assert of_rate(0.05) == digests.digest(cases[CASE])[0]
    assert of_rate(0.05) != of_rate(np.nextafter(0.05, 1.0))


def test_wrong_calls_come_before_the_first_and_do_not_show_in_it():
    given: list[tuple[Any, np.ndarray, bool]] = []

    def function(x: Any, y: Any) -> None:
        given.append((x, np.copy(y), x is y))
        y[...] = 7

    def case(record: Record) -> None:
        for _ in range(2):
            record.attempt(function, x=0.5, y=np.zeros(1))

    records = Record(), Record()
    wrongly(records[0], case)
    *wrong, first, second = given
    assert first == second == (0.5, np.zeros(1), False)
    assert any(x is None for x, *_ in wrong) and any(is_same for *_, is_same in wrong)
    assert {np.object_, np.bool_, np.int8} <= {y.dtype.type for _, y, _ in wrong}
    case(records[1])
    assert records[0].digest != records[1].digest


DIFFERENT: list[tuple[Any, Any]] = [
    (np.zeros(2), -np.zeros(2)), (np.zeros((1, 2)), np.zeros((2, 1))),
    (np.zeros(2, np.int32), np.zeros(2, np.float32)), ([1, [2]], [[1], 2]), (1, True), (1, 1.0),
    (("a", "b"), ("ab",)), (ValueError("a"), TypeError("a")), (ValueError("a"), ValueError("b")),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_what_differs_has_another_digest(a, b):
    assert digest_of(a) != digest_of(b)


def test_places_of_memory_and_of_modules_are_not_looked_at():
    texts = "<fusestep.nn.adam.Adam at 0x7f01>", "<fusestep.nn.engine.other.Adam at 0xab>"
    assert digest_of(texts[0]) == digest_of(texts[1])


def test_comparison_with_another_tree(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "digests.json"
    run = partial(digests.main, ["--only", CASE, "--against", str(file)])
    assert digests.main(["--only", CASE, "--output", str(file)]) == 0
    assert run() == 0
    for others, status, said in (({}, 0, "is new"), ({CASE: "another"}, 1, "differs")):
        file.write_text(json.dumps({**json.loads(file.read_text()), "cases": others}))
        assert run() == status
        assert f"{said}: {CASE}" in capsys.readouterr().out
