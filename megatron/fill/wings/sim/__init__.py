"""The event simulator: clusters of any size, by the planner, the scheduler and the policies that the runtime runs."""
