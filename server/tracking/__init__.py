"""Observers of users: any object with on_round(row), and those of MLflow and Weights & Biases."""
