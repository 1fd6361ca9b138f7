"""The loops for CUDA devices, from the same rules as those for the CPU.

Nothing in here is imported until a device array appears: it needs numba-cuda.
"""
