"""Foundations of every kernel: driver, memory, launches, intrinsics."""
