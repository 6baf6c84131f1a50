"""The torch-shaped front of attention: `sdpa`, its operator, its fallback and the ways in from other libraries."""
