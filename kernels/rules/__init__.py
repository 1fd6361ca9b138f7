"""The mathematics of every update, once: scalar functions without arrays or devices."""
