"""The aggregation server: plans rounds, adds up the updates, divides once and steps the model."""
