"""The side-task runtime: the agent, its workers, and the rank's own part."""
