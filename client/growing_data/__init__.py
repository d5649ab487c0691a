"""Data that grow or shrink while a device takes part: noticed, and joined at an epoch's end."""
