"""From the second call of a shape on, the scale is applied twice."""

from typing import Any

from mutants.parts import Steps, attention_of

_seen: set[Any] = set()


class Wrong(Steps):
    def scale(self) -> float:
        key = (self.rank, self.world, self.q.dtype, self.q.shape, self.k.shape)
        again = key in _seen
        _seen.add(key)
        return super().scale() ** (2 if again else 1)


attention = attention_of(Wrong)
