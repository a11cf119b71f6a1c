"""The limits of workers, and the device memory that the training leaves free.

The agent opens the device of its rank and gets a ``Limiter`` for each worker.
"""
