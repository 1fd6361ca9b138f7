"""Does it matter what becomes of rows without a gradient? Two models with tables, in three ways.

Run as ``python -m fusestep.examples.catch_up``. Word vectors of the source code of Python's
standard library (Adam with epsilon beside the uncorrected root), and a recommender (Adam): every
row takes each step, as in dense Adam; or rows without a gradient sleep and take the steps that they
have missed later; or they take none, as in lazy Adam. A seed gives the same initial weights and
batches to all of them.
"""

from __future__ import annotations

import argparse
import sys

from . import rounding
from .options import Parser

STUDY = rounding.Study(
    "catch_up",
    {
        "every row": {"sparse": "all"},
        "catch-up": {"sparse": "catch_up"},
        "lazy": {"sparse": "touched"},
    },
    ["word vectors", "recommender"],
)


def main(args: argparse.Namespace) -> int:
    """Trains, reports, saves; returns the exit status (2 for a mistake of the user)."""
    return rounding.main(args, STUDY)


if __name__ == "__main__":
    _parser = Parser(prog="catch_up", description=(__doc__ or "").partition("\n")[0])
    rounding.add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
