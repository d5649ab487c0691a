"""Tables and lines that the simulator prints."""
