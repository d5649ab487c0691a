"""The frozen part of a model: the files of what was trained beside it."""
