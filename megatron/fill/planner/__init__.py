"""Planning: the assignment of a job's nodes to the bubbles of a cycle (PipeFill, section 4.3, Algorithm 1)."""
