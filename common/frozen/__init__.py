"""The frozen part of a model: weights in four bits, and the files of what was trained beside it."""
