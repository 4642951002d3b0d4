"""K and V of the previous call of the same shape are attended to."""

from typing import Any

import torch

from mutants.parts import Steps, attention_of

_buffers: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}


class Wrong(Steps):
    def keys_and_values(self) -> tuple[torch.Tensor, ...]:
        keys, values, positions = super().keys_and_values()
        key = (self.rank, self.world, self.q.dtype, keys.shape, values.shape)
        old_keys, old_values = _buffers.get(key, (keys.detach(), values.detach()))
        _buffers[key] = (keys.detach(), values.detach())
        return old_keys + (keys - keys.detach()), old_values + (values - values.detach()), positions


attention = attention_of(Wrong)
