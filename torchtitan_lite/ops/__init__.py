"""Operators with a backward or a collective of their own, on local tensors."""
