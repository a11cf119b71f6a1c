"""Pipeline schedules as data: the order of each rank's passes, their times, and the resulting bubbles."""
