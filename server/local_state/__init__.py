"""The server's part of algorithms that keep a state between rounds: the mean control variate."""
