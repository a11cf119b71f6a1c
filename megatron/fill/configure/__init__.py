"""Which parallel configuration, and which rank on which device."""
