"""Loops of the CPU: dense tensors, rows that occur, whole tables, grouping of duplicates."""
