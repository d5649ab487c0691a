"""What carries the rounds: this process, gRPC processes, or Flower's Ray."""
