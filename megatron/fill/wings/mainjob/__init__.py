"""Cost model of a training: its model, GPUs, network and layout, and the time and memory of each stage from these."""
