"""Threads, the loops that run on them and what they count, and memory kept between calls."""
