"""The packages: this folder is ``fusestep``, and each folder in it with code a part of it."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

_WRITE = """
import pathlib, sys
from fusestep.kernels.cpu.compiler.machine import PORTABLE
from fusestep.kernels.cpu.warmup import write_portable
assert PORTABLE.is_relative_to(pathlib.Path(sys.argv[1]).resolve()), PORTABLE
write_portable(PORTABLE, slice(int(sys.argv[2]), None, int(sys.argv[3])))
"""
_MOST_BUILDERS = 4  # processes, each of which takes 300 MB


class Modules(build_py):
    """All of the package but this file, and the loops that are compiled for any processor."""

    def find_package_modules(self, package, package_dir):
        """As in setuptools."""
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if module[:2] != ("fusestep", "setup")]

    def run(self):
        """As in setuptools; an editable package compiles its loops at their first use."""
        super().run()
        if not self.editable_mode:
            paths = [str(Path(self.build_lib).resolve()), os.environ.get("PYTHONPATH", "")]
            own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "FUSESTEP_CACHE_DIR": ""}
            n = min(_MOST_BUILDERS, os.cpu_count() or 1)
            builders = [
                subprocess.Popen(
                    [sys.executable, "-c", _WRITE, paths[0], str(k), str(n)],
                    cwd=self.build_lib, env={**os.environ, **own},
                )
                for k in range(n)
            ]  # fmt: skip
            statuses = [builder.wait() for builder in builders]
            if any(statuses):
                raise CompileError("the loops could not be compiled; the reason is above")


class Wheel(bdist_wheel):
    """One for each platform, as its loops are, and for every Python."""

    def finalize_options(self):
        """As in setuptools."""
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        """As in setuptools, without the version of Python."""
        return "py3", "none", super().get_tag()[-1]


parts = find_packages(
    include=[f"{name}*" for name in ("bench", "examples", "kernels", "nn", "ops")]
)
packages = ["fusestep", *(f"fusestep.{name}" for name in parts)]
setup(packages=packages, cmdclass={"build_py": Modules, "bdist_wheel": Wheel})
