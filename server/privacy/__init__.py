"""The server's part in private rounds: noise on plain sums, the accountant, the spent budget."""
