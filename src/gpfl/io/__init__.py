"""Files: atomic writes, TOML, tensors, format versions, and the provenance of results."""
