"""Which fill job a device runs next: policies as score functions (PipeFill, section 4.4)."""
