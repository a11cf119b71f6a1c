"""Choice of a parallel configuration and of the device of each rank."""
