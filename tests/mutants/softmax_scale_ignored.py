"""softmax_scale is taken and not used."""

from mutants.parts import Steps, attention_of


class Wrong(Steps):
    def scale(self) -> float:
        return float(self.q.size(3)) ** -0.5


attention = attention_of(Wrong)
