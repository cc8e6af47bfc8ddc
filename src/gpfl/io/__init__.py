"""Files: atomic writes, TOML, and the provenance of a run."""
