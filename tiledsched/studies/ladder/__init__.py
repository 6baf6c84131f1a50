"""Attention as one would first write it in cuTile, one edit at a time, and on to the kernel that is served.

The edits and their order are those of NVIDIA's playbook for flash attention in cuTile Python. :mod:`tiles` is the kernel,
:mod:`rungs` the ladder, :mod:`pages` what is written, and :mod:`targets` what each arch should be compiled with.
"""
