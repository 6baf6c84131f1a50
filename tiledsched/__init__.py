"""Find, prove, keep and serve the best schedule of a cuTile kernel."""

__version__ = "0.1.0"
