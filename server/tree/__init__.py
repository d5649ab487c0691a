"""One level of a tree: aggregators that serve devices and answer to the server above."""
