"""Studies that users run on their own GPU: the paper's evaluation, the ladder, the ablation, and profiles."""

REGIMES = {"burst": "at full clocks", "sustained": "at the power cap"}
"""Regime -> how it is said to readers."""
