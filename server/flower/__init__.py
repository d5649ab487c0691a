"""The server as a Flower ServerApp, Strategy and Grid."""
