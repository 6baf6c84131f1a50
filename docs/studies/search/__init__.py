"""Replays ways to search on recorded landscapes, without a GPU."""
