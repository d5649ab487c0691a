"""What a plan says of windows without a link."""
