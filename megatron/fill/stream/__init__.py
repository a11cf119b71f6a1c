"""Bubbles in GPU time: the rank's Python says ahead of the GPU what comes, and signals say when the GPU is there."""
