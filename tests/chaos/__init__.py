"""Chaos: faults and attacks in the jobs of a real training, to show that none of them reaches the training."""
