"""The composition root: the one room that knows all the others."""
