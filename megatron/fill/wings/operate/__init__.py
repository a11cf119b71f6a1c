"""The metrics of a run, for an operator's tools."""
