"""The versions of megatron-core that the patches are tested with.

``scripts/test.sh --megatron VERSION`` runs the tests with another one; pip installs none older than these.  Other
versions are not refused: the signatures decide.  setup.py and scripts/setup.sh read this file too, so it imports
nothing.
"""

TESTED = ">=0.18,<0.20"
