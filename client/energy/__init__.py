"""The owner's limits: active hours, bytes per day, and less time on battery or when hot."""
