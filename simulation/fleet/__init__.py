"""The simulated devices: hardware, availability, faults."""
