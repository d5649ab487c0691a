"""A second server for a run: its shared state, the term of the serving server, the takeover."""
