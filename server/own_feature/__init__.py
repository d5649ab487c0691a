"""What a feature of the user's does on the server."""
