"""How a device gets its certificate and its signing identity."""
