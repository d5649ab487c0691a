"""The gRPC port for devices."""
