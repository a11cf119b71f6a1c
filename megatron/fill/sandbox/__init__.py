"""The sandbox of a job: isolation layers of the kernel, in place before any byte of the job is read."""
