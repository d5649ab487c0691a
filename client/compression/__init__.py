"""What a device's compressed updates left out, and where it is kept from round to round."""
