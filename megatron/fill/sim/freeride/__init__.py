"""FreeRide's study (arXiv 2409.06941) in virtual time: its rules beside those of this runtime."""
