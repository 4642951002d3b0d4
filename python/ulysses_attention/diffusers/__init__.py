"""Transformers of diffusers over several ranks, in two lines.

    from ulysses_attention.diffusers import parallelize
    parallelize(pipe, group)   # every rank then calls pipe(...) with the same arguments

Nothing in diffusers is changed; `.remove()` of what it returns restores the model.
"""

from ulysses_attention.diffusers.attention_processor_ulysses import UlyssesAttnProcessor, ulysses_processor
from ulysses_attention.diffusers.families import FAMILIES
from ulysses_attention.diffusers.parallel import Handle, parallelize
from ulysses_attention.diffusers.plan import Attend, Compute, Gather, Segments, Shard, ShardingPlan
from ulysses_attention.diffusers.streams import Streams
from ulysses_attention.diffusers.verify import Verification, verify

__all__ = [
    "FAMILIES",
    "Attend",
    "Compute",
    "Gather",
    "Handle",
    "Segments",
    "Shard",
    "ShardingPlan",
    "Streams",
    "UlyssesAttnProcessor",
    "Verification",
    "parallelize",
    "ulysses_processor",
    "verify",
]
