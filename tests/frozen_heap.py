"""Excludes what is imported by now from Python's garbage collection, in this process and its forks.

A command that collects its garbage would else scan torch and flwr, and so copy their pages.
"""

import gc

gc.collect()
gc.freeze()
