"""What a plan says of the parameters that stay on a device."""
