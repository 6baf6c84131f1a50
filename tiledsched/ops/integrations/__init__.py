"""Ways in for programs that do not call `sdpa` themselves: torch, transformers, diffusers, Hugging Face kernels.

Each integration is a module of its own and imports its library only when used.
"""
