"""The gRPC stream from the device to the server."""
