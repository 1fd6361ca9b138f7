"""Learning rates that follow the number of the step."""
