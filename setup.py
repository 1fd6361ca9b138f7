"""The packages: this folder is ``fusestep``, and each folder in it with code a part of it."""

from setuptools import find_packages, setup

parts = find_packages(
    include=[f"{name}*" for name in ("bench", "examples", "kernels", "nn", "ops")]
)
setup(packages=["fusestep", *(f"fusestep.{name}" for name in parts)])
