"""Cases with a method of their own."""
