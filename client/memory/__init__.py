"""Makes training fit into the device's memory."""
