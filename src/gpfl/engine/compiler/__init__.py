"""A training step traced once and rewritten: graph passes, kernels and the program that runs them."""
