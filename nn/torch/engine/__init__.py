"""Tensors of PyTorch in the place of arrays: checked, bound to kernels, looked at in each step."""
