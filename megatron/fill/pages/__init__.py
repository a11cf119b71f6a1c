"""Shared memory between processes: each page has one writer, and readers that it cannot harm."""
