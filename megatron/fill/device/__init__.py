"""What a worker may use, and what the main job leaves free."""
