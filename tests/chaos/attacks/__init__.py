"""Attacks of the jobs of a chaos run on the training, its agents, the kernel and one another.

There is a module per family.  Each attack is a small function in its module's table; a side task of the chaos run
(``task.Attacker``) commits it in a step, against processes and files of that run only.  ``brought`` has what a job
brings along, ``outside`` the kinds that the driver commits.
"""
