"""Code in the rank and in its relay: predicts bubbles, and opens and shuts the gate."""
