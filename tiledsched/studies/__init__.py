"""How we know: the bench, the studies and the replays behind every figure in `docs/results/`."""
