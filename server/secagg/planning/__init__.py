"""What masks change in a round's plans: limits of the quotas, and the times of the answers."""
