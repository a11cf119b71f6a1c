"""Shared memory between processes: each page has one writer, and readers who cannot be harmed by it."""
