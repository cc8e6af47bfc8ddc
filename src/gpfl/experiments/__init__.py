"""Studies: several runs that answer one question."""
