"""What every optimizer is: parameters, groups, learning rates, states, checkpoints."""
