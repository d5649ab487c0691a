"""An aggregator's process: a server to its own devices, and a device to the server above."""
