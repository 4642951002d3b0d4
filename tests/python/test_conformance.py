"""The built-in backend as its author would test it: whatever the table promises works, on threads of this process."""

from ulysses_attention import _C
from ulysses_attention.pytest_plugin import ulysses_conformance

PROMISED = [feature for feature, error_id in _C.capabilities("ulysses").items() if not error_id]

test_built_in_backend = ulysses_conformance("ulysses", quick=True, strict=PROMISED)
