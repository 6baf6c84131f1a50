"""Times a kernel and other implementations of the same problem: interleaved, paced, and checked against float64."""
