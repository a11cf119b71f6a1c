"""Main jobs described: model, GPUs, network and layout in; costs, memory, timeline and bubbles out."""
