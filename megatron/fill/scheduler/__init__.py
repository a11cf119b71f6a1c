"""The choice of a device's next job, by policies that are score functions (PipeFill, section 4.4)."""
