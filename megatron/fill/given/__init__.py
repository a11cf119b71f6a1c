"""Users' input: files, sizes, times.  Parsing is strict; errors name the place, the value and what was expected."""
