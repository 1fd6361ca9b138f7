"""What runs loops in parallel, commits what they wrote, and keeps memory between calls."""
