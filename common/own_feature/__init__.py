"""A feature of the user's: one class, for the plans and for both sides."""
