"""Real runs replayed in virtual time and compared with the simulator's predictions."""
