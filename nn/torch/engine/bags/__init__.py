"""Bags of PyTorch's tables: their arguments, their gradients, and steps in backward."""
