"""Wings: parts beside the core, which knows none of them; each is optional for a training with ``--fill-jobs``."""
