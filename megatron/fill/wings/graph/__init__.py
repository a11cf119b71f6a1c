"""Graph pipelines: a model with branches cut into a graph of stages (GraphPipe, Jeon et al. 2024, arXiv 2406.17145)."""
