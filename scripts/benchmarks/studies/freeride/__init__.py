"""FreeRide's study (arXiv 2409.06941) in virtual time: its rules compared with those of this runtime."""
