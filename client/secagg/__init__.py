"""The client's half of secure aggregation."""
