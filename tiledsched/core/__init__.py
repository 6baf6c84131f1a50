"""What an author declares of a kernel, and what every other part of the package knows."""
