"""Traces a training step once and rewrites it: graph passes, kernels and the program that runs them."""
