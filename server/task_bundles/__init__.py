"""Publishes a task as a bundle, which the server hands to devices that trust its signer."""
