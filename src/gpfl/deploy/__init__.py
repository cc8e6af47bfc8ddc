"""Federations across machines: each site trains on its own data, and a coordinator averages what they upload."""
