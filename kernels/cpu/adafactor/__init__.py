"""Adafactor's steps on matrices: second moments of rows and columns."""
