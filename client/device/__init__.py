"""The device's hardware and sensors, and its owner's limits on time and bytes."""
