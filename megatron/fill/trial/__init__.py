"""Trials of jobs without a training: a check before they run, their steps alone, and a run beside a stand-in for one.

Agent, worker, sandbox, gate and store are those of a real run; only the training is replaced.
"""
