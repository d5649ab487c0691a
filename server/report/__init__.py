"""The report of a run: what its rounds and devices did, as one page to open in a browser."""
