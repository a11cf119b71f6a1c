"""What runs in the rank, and in the relay beside it: bubbles are predicted, and the gate is opened and shut."""
