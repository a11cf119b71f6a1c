"""Main jobs from the records of real runs, for the simulator."""
