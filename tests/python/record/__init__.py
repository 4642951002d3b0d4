"""Failures that users of other context-parallel code reported in public: each one's smallest input, the right value.

Tests of one failure share a number, as in test_b04. The docstring says what went wrong there and where it was reported.
"""
