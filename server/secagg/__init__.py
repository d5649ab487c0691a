"""The server's half of secure aggregation."""
