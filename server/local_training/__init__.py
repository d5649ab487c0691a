"""The server's part of local steps: the correction of unlike numbers of steps."""
