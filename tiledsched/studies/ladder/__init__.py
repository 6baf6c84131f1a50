"""Measures attention from a first kernel in cuTile to the served one, an edit at a time.

The edits and their order are those of NVIDIA's playbook for flash attention in cuTile Python. :mod:`tiles` is the kernel,
:mod:`rungs` the ladder, :mod:`pages` what is written, and :mod:`targets` what each arch should be compiled with.
"""
