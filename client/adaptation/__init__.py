"""Fine-tunes a released model on the owner's own data, and predicts with it: nothing is sent."""
