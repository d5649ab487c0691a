"""``headwater new``: a task for the user's own data, which runs at once on data made up for it."""
