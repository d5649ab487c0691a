"""The device as a Flower ClientApp on a SuperNode."""
