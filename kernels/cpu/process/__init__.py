"""The process itself: what forks wait for; whether there is memory, and threads can start."""
