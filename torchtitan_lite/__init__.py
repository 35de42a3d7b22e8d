"""A complete LLM pretraining framework that one person can read in three days."""

__version__ = "0.1.0"
