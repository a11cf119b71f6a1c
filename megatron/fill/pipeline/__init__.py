"""Pipeline schedules as data: who computes what in which order, how long it takes, and the bubbles that it leaves."""
