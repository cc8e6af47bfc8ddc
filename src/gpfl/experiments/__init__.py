"""Comparisons, hyperparameter search, attack studies and the paper's tables: several runs that answer one question."""
