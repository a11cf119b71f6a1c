"""Trials of jobs without a training: a check before they run, and a run in the bubbles of a stand-in that only waits.

Agent, worker, sandbox, gate and store are those of a real run; only the training is replaced.
"""
