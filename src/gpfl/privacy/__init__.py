"""Privacy: what a curious server can reconstruct or infer from uploads, compared with guesses that need no upload."""
