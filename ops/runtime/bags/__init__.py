"""Bags of ids: how they are read, pooled, and turned into gradients."""
