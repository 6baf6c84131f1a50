"""The studies behind the figures of docs/results: run by the authors, in a checkout, and not part of the wheel."""
