"""The client algorithm that the settings name: how it is found, and its trial."""
