"""A task made from what a user has already: a model, a data set and a loss of torch's."""
