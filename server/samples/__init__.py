"""A sample of what the model makes, such as a text, after each of the server's tests."""
