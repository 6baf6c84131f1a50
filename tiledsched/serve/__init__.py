"""Serving: which schedule a call gets, and the call itself."""
