"""A task in one signed file, which a server hands to devices whose owners trust the signer."""
