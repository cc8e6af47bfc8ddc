"""Privacy: what a curious server can rebuild or guess from what clients send, measured beside what needs no attack."""
