"""Training: configuration, the round loop, the run directory, results, and the functions `fit`, `resume` and `load`."""
