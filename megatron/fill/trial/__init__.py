"""Jobs tried without any training: looked at before they run, and run in the bubbles of a main job that only waits.

Everything that judges them is the runtime's own: agent, worker, walls, gate and store.  Only the main job is none.
"""
