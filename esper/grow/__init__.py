"""Grow the user's own network: in a loop of one's own, or by a callback."""
