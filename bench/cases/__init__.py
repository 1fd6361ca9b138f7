"""Cases, their sizes and options, and the bytes that they move."""
