"""Positive controls: each attack in a world of its own, without the wall that is to stop it.  There it must succeed.

An attack that fails behind a wall proves the wall only if it succeeds where the wall is not.
"""
