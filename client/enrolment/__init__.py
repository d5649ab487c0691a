"""The client's credentials: its certificate and its signing identity."""
