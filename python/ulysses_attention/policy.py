"""The policy: how context parallelism is done. A Python value over the C++ contract."""

from __future__ import annotations

import dataclasses
from typing import Any

from ulysses_attention import _C

__all__ = ["EXACT", "UlyssesContextParallelPolicy"]


def option_line(name: str, value: Any) -> str:
    """One option as the C++ core reads it: any value, on one line."""
    if isinstance(value, bool):
        text = "1" if value else "0"
    elif isinstance(value, tuple):
        text = ",".join(map(str, value))
    else:
        text = str(value)
    return f"{name}={' '.join(text.splitlines())}\n"


@dataclasses.dataclass(frozen=True)
class UlyssesContextParallelPolicy:
    """The single source of truth for how context parallelism is done. Every field steers behaviour or is refused.

    Fields, with their defaults and meaning: see `ulysses guide`, which is rendered from them.
    """

    backend_name: str = "ulysses"
    require_seq_divisible: bool = True
    auto_pad: bool = True
    pad_multiple: int = 8
    kv_must_be_global: bool = True
    output_restore_dim: int = 1
    base_processor: str = "UlyssesAttentionProcessor"
    required_checks: tuple[str, ...] = ("seq_divisible", "kv_global_gathered", "output_restore_dim")

    def __post_init__(self) -> None:
        object.__setattr__(self, "required_checks", tuple(self.required_checks))
        # What differs from the defaults, as the C++ core reads it; computed once so that tracing sees a constant.
        changed = "".join(
            option_line("policy." + field.name, getattr(self, field.name))
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        object.__setattr__(self, "_text", changed)

    @property
    def text(self) -> str:
        """The fields that differ from the defaults, as the C++ core reads them."""
        text: str = self._text  # type: ignore[attr-defined]
        return text

    def padded_seq_len(self, seq_len: int, cp_size: int) -> int:
        """The length to pad to: the next multiple of cp_size * pad_multiple, or seq_len if divisibility isn't required.

        Units:  tokens.
        Errors: CP006 for sizes that are not positive, CP007 on overflow.
        """
        return int(_C.padded_seq_len(self.text, seq_len, cp_size))

    def validate_config(self, seq_len: int, cp_size: int) -> list[str]:
        """Every problem of this policy with the raw length, as text; empty if there is none. Never raises."""
        return list(_C.validate_config(self.text, seq_len, cp_size))

    def replace(self, **changes: Any) -> UlyssesContextParallelPolicy:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


#: Shards that differ by at most one token, without padding.
EXACT = UlyssesContextParallelPolicy(require_seq_divisible=False)
