"""How one step runs: gradients are read and checked, planned, and run where they live."""
