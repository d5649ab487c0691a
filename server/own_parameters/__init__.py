"""What the server says of the parameters that stay on devices."""
