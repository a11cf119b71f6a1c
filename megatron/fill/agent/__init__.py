"""The process beside each rank that takes jobs from the store, runs each in a worker and holds it to its limits."""
