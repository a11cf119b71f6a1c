"""What a main job costs: its model, its GPUs and network, its layout, and from these time and memory of each stage."""
