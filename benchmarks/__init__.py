"""A script for each claim, each against a named peer in one run; see RESULTS.md."""
