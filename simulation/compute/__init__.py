"""How the gradients of simulated devices are computed."""
