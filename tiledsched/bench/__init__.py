"""`sdpa` beside every other attention at hand: interleaved, paced, checked against float64, to CSV and a table."""
