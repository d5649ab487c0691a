"""The client as a Flower ClientApp: requests, state, suspended updates."""
