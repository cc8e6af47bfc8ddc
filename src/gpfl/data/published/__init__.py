"""Published datasets, one module each, with their download, archive reader and cache."""
