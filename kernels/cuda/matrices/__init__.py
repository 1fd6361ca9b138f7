"""Steps on matrices whose rows and columns have states: running means of what an element gives."""
