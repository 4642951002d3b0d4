"""Examines a context-parallel attention from outside: what works, what is refused, what is silently wrong."""
