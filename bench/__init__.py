"""The benchmark behind ``fusestep bench``; see `command` for its options."""
