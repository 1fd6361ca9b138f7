"""Results files, and the tables, pictures and documents made of them."""
