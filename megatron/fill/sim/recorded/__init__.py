"""Main jobs that have been run: their records as the simulator's main job."""
