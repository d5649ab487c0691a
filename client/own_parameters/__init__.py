"""Parameters that stay on the device and are trained there alone."""
