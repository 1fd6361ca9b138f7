"""A model of clicks: the clicks, the network, its trainings, and what they measure."""
