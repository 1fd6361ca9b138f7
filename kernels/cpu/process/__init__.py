"""The process itself: what it does at a fork, and whether memory and threads are available."""
