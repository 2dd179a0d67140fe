"""gend turns a file of prompts into finished training data on a rented GPU box."""

__version__ = "0.1.0"
