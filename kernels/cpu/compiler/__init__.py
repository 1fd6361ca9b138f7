"""From functions to machine code that is called by its address, kept on disk."""
