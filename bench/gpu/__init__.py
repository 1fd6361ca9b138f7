"""Steps on a CUDA device: ``python -m fusestep.bench.gpu``."""
