"""The model as one flat vector, and as a file."""
