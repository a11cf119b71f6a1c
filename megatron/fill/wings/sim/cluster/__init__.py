"""The cluster: devices with bubbles, jobs that come and go, and the events between them."""
