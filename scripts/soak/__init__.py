"""A real server under random traffic, every answer of which is checked."""
