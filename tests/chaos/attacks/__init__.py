"""What jobs of a chaos run try against the training, its agents, the machine's kernel and one another.

A module per family.  Each attack is a small function in its module's table; it is committed by a side task of the
chaos run (``task.Attacker``) in a step, against processes and files of that run alone.  What a job brings along is in
``brought``, what the driver does from outside in ``outside``.
"""
