"""What algorithms of local training keep between rounds, in a plan."""
