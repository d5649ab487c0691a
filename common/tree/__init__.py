"""What a server and its aggregators tell each other."""
