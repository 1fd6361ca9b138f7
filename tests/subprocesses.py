"""Run a program in a fresh interpreter, as a user would."""

import os
import subprocess
import sys
import textwrap


def run_python(program, *arguments, timeout=300, **environment):
    """The completed process of ``python -c program`` with these environment variables."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def output_of(program, *arguments, **environment):
    """What the program printed; it must have ended well."""
    done = run_python(program, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
