"""What a plan says of work that goes on while the update before it is sent."""
