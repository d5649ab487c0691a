"""What an operator sees and orders."""
