"""A plan to start from, for a model that has none: guessed from the names of its modules and arguments."""

from __future__ import annotations

import inspect

import torch

__all__ = ["template"]

ROTARY = ("rope", "pos_embed", "rotary", "rotary_emb")


def _first_blocks(model: torch.nn.Module) -> tuple[str, torch.nn.Module]:
    """The first list of blocks that attend, and its first block."""
    for path, module in model.named_children():
        attends = any(hasattr(child, "set_processor") for child in module.modules())
        if isinstance(module, torch.nn.ModuleList) and len(module) and attends:
            return f"{path}.0", module[0]
    return "blocks.0", torch.nn.Identity()


def _attention_lines(model: torch.nn.Module, streams: str) -> list[str]:
    """One line for each name under which attention modules stand."""
    lines: dict[str, str] = {}
    for path, module in model.named_modules():
        if not hasattr(module, "set_processor"):
            continue
        name = path.rsplit(".", 1)[-1]
        cross = name in ("attn2", "cross_attn") or bool(getattr(module, "is_cross_attention", False))
        if cross:
            lines.setdefault(name, f'        "**.{name}": "local",  # keys and values are text that every rank holds')
        else:
            lines.setdefault(name, f'        "**.{name}": Attend(({streams})),')
    return list(lines.values()) or ['        "**.attn": Attend(("image",)),']


def template(model: torch.nn.Module) -> str:
    """The plan as Python text."""
    path, block = _first_blocks(model)
    parameters = inspect.signature(block.forward).parameters
    tokens = next((name for name in parameters if name in ("hidden_states", "x", "img")), "hidden_states")
    cross = any("attn2" in name or "cross_attn" in name for name, _ in block.named_children())
    joint = "encoder_hidden_states" in parameters and not cross
    text = ', "encoder_hidden_states": Shard(1, "text")' if joint else ""
    rotary = [
        name for name, child in model.named_children() if name in ROTARY and next(child.parameters(), None) is None
    ]
    last = [name for name, child in model.named_children() if "proj_out" in name] or ["proj_out"]
    lines = [
        "from ulysses_attention.diffusers import Attend, Gather, Shard, ShardingPlan",
        "",
        "plan = ShardingPlan(  # Shard(1, ...): dim 1 counts the tokens",
        f'    inputs={{"{path}": {{"{tokens}": Shard(1, "image"){text}}}}},',
    ]
    lines += [f'    outputs={{"{name}": Shard(-2, "image")}},  # the dim of its tokens' for name in rotary[:1]]
    lines += ["    attention={", *_attention_lines(model, '"text", "image"' if joint else '"image",'), "    },"]
    lines += [f'    gather={{"{last[0]}": Gather(1, "image")}},  # where the output is whole again', ")"]
    return "\n".join(lines) + "\n"
