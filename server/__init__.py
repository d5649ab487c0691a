"""The aggregation server: it adds what the devices send, divides once and steps the model."""
