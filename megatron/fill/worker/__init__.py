"""The worker: the process in which one job runs its steps, while the next one fits into the bubble."""
