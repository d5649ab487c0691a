"""The wire format, its limits, certificates and TLS."""
