"""What processes count, time and tell of their work. Nothing that trains or samples depends on it."""
