"""What right means: inputs, sizes, error, tolerance and comparison, for every part that asks whether a kernel is right."""
