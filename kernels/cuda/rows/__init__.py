"""Row-sparse steps: occurrences are sorted by row, summed, and each row steps once."""
