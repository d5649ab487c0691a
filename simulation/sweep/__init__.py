"""Many runs over a grid of settings."""
