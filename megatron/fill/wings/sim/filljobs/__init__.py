"""Fill jobs: their kinds, and where they come from: traces, generators, jobs files, job stores, reports."""
