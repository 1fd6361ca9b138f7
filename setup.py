"""The packages: this folder is ``fusestep``, and each folder in it with code a part of it."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class Modules(build_py):
    """All of the package but this file."""

    def find_package_modules(self, package, package_dir):
        """As in setuptools."""
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if module[:2] != ("fusestep", "setup")]


parts = find_packages(
    include=[f"{name}*" for name in ("bench", "examples", "kernels", "nn", "ops")]
)
packages = ["fusestep", *(f"fusestep.{name}" for name in parts)]
setup(packages=packages, cmdclass={"build_py": Modules})
