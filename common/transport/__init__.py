"""The wire format between device and server, its limits, certificates and TLS."""
