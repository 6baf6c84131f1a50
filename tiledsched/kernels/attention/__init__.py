"""The attention forward kernel and everything that knows it."""
