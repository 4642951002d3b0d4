"""The default scale is 1 / D, not 1 / sqrt(D)."""

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def scale(self) -> float:
        given = self.options.softmax_scale
        return 1.0 / self.q.size(3) if given is None else given


attention = attention_of(Wrong)
