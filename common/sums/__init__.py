"""What a round adds up."""
