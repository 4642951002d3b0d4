"""Context-parallel attention, right for every length and head count, from one policy.

One call: `ulysses_attention(q, k, v, cp_group)`. One base class for backends: `UlyssesAttentionProcessor`. One policy:
`UlyssesContextParallelPolicy`. The guide: `ulysses guide`.
"""

from ulysses_attention._load import __version__, load_core

load_core()

from ulysses_attention import shm  # noqa: E402
from ulysses_attention.attention import ulysses_attention  # noqa: E402
from ulysses_attention.check import check_attention, check_same  # noqa: E402
from ulysses_attention.gradients import sum_grad, sum_gradients  # noqa: E402
from ulysses_attention.launch import run_processes  # noqa: E402
from ulysses_attention.layout import SequenceLayout  # noqa: E402
from ulysses_attention.merge import merge_attention  # noqa: E402
from ulysses_attention.policy import UlyssesContextParallelPolicy  # noqa: E402
from ulysses_attention.processor import (  # noqa: E402
    AttendCall,
    UlyssesAttentionProcessor,
    backends,
    register_backend,
    unregister_backend,
)
from ulysses_attention.randomness import token_dropout, token_noise  # noqa: E402
from ulysses_attention.ranks import run_ranks  # noqa: E402
from ulysses_attention.tokens import JointTokens, MaskLayout  # noqa: E402
from ulysses_attention.training import loss_scale, token_mean_loss, total_tokens  # noqa: E402

shm.register()

__all__ = [
    "AttendCall",
    "JointTokens",
    "MaskLayout",
    "SequenceLayout",
    "UlyssesAttentionProcessor",
    "UlyssesContextParallelPolicy",
    "__version__",
    "backends",
    "check_attention",
    "check_same",
    "loss_scale",
    "merge_attention",
    "register_backend",
    "run_processes",
    "run_ranks",
    "sum_grad",
    "sum_gradients",
    "token_dropout",
    "token_mean_loss",
    "token_noise",
    "total_tokens",
    "ulysses_attention",
    "unregister_backend",
]
