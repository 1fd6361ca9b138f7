"""After calls that failed a process gives the bits of a fresh one."""

from __future__ import annotations

from subprocesses import output_of

PROGRAM = """
    import sys, left_behind
    left_behind.main(fresh=sys.argv[1] == "fresh")
"""


def test_failing_calls_leave_nothing_behind() -> None:
    fresh, after = (output_of(PROGRAM, how).splitlines() for how in ("fresh", "after"))
    assert len({line.partition(" ")[0] for line in fresh}) == len(fresh) > 8
    assert len(after) > len(fresh) and {*after} == {*fresh}
