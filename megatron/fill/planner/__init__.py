"""How a fill job's nodes are laid into a bubble cycle (PipeFill, section 4.3, Algorithm 1)."""
