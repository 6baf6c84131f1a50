"""Profiles methods with Nsight Compute, side by side.

:mod:`metrics` is what is read, :mod:`run` starts the profiler, :mod:`launch` runs under it, and :mod:`pages` is what is written.
"""
