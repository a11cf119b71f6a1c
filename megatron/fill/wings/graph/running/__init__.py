"""Training of a graph plan with Megatron: the part of the graph wing that imports it."""
