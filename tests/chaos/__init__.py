"""Chaos: a real training under many injected faults of its side tasks, to show that none of them reaches it."""
