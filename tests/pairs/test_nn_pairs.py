"""Each pair of features of `fusestep.nn`: right, or refused by the error that is documented."""

import warnings
from pathlib import Path

import pytest
from pair_nn import NOT_APPLICABLE, PAIRS, PARTS, REFUSED, outcome, plan_of
from pair_reference import assert_as_known, assert_of_pairs


@pytest.mark.parametrize("name", PARTS)
def test_all_pairs_of_a_feature(name: str, tmp_path: Path) -> None:
    for n, pair in enumerate(pair for pair in PAIRS if pair[0] == name):
        if frozenset(pair) in NOT_APPLICABLE:
            continue
        (folder := tmp_path / str(n)).mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            result = outcome(plan_of(*pair), folder, n)
        assert_as_known(pair, result, REFUSED)


def test_every_verdict_is_of_a_pair() -> None:
    assert_of_pairs(PAIRS, REFUSED, NOT_APPLICABLE)
