"""The process in which one job runs: steps while the next one fits into the bubble."""
