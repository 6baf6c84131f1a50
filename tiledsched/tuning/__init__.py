"""Searching: which schedules to build and measure, and which of them wins."""
