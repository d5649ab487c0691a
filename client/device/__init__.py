"""The machine: hardware, sensors, and the limits that its owner sets."""
