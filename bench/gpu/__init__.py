"""Steps on a CUDA device: ``fusestep bench --device cuda``, and the checks of ``bench/gpu.sh``."""
