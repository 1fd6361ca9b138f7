"""The base of every optimizer: parameters, groups, learning rates, states, checkpoints."""
