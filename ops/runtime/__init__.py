"""What is under the operators: arrays and frameworks, checks, locks, streams, steps."""
