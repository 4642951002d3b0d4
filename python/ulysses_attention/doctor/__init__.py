"""Examines context-parallel attention from outside: what it does when it is used, and when ranks fail."""
