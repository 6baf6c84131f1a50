"""The search bench: every way to search, replayed on the same recorded landscapes, without a GPU."""
