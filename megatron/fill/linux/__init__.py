"""What Linux offers and Python has no name for: processes, shared memory, signals, control groups."""
