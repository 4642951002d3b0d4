"""Failures that users of other context-parallel code reported in public: each row's smallest input, the right value.

A test carries its row's id in its name. Its docstring says what went wrong there, and where that was reported.
"""
