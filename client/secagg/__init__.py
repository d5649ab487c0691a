"""The device's half of secure aggregation."""
