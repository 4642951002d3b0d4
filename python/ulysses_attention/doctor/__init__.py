"""The doctor: examines a context-parallel attention from outside and reports what is right, refused or wrong."""
