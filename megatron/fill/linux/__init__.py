"""Linux interfaces that Python lacks: processes, shared memory, signals, control groups."""
