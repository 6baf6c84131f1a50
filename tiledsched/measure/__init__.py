"""Measuring: artifacts become evidence. The only part that needs a GPU."""
