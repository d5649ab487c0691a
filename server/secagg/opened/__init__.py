"""What is believed of an opened sum, and the search for the member that masked a false number."""
