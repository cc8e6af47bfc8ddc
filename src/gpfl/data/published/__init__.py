"""Published datasets: one module each, with the download, the archive reader and the cache they share."""
