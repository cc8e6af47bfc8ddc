"""What a method author reads: trees, losses, nets, the method interface, a client's local round, randomness."""
