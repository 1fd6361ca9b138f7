"""Ids of 64 bits, and the rows that they get."""
