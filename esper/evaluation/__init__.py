"""Compare controllers on the same episodes."""
