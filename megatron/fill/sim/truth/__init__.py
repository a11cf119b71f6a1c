"""Real runs taken apart, played again in virtual time, and compared with what the simulator says of them."""
