"""Loops of the CPU: dense tensors, touched rows, whole tables, grouping of duplicates."""
