"""Positive controls: each attack in a world of its own, without the sandbox layer that stops it, where it must succeed.

An attack that fails behind a layer proves the layer only if it succeeds without it.
"""
