"""NVIDIA's own recipes with a pipeline, shrunk for a few cores: with jobs in their bubbles and without."""
