"""Operating a run: orders, status, history, round log, metrics and progress display."""
