"""The process next to each rank that takes jobs from the store, runs each in a worker and enforces its limits."""
