"""What a plan says of local steps."""
