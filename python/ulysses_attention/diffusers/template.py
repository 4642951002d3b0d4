"""A plan to start from, for a model that has none: guessed from the names of its modules and arguments."""

from __future__ import annotations

import inspect

import torch

from ulysses_attention.diffusers.plan import attention_modules, is_cross

__all__ = ["template"]

ROTARY = ("rope", "pos_embed", "rotary", "rotary_emb")


def _first_blocks(model: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
    """The first list of blocks that attend, and its first block."""
    for path, module in model.named_children():
        if isinstance(module, torch.nn.ModuleList) and len(module) and attention_modules(dict(module.named_modules())):
            return f"{path}.0", module[0]
    return None


def _has_convolutions(model: torch.nn.Module) -> bool:
    """Whether there are convolutions beside those that make patches, which step by their own size."""
    return any(
        module.kernel_size != module.stride
        for module in model.modules()
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d))
    )


def _attention_lines(model: torch.nn.Module, streams: str) -> list[str]:
    """One line for each name under which attention modules stand."""
    lines: dict[str, str] = {}
    for path, module in attention_modules(dict(model.named_modules())):
        name = path.rsplit(".", 1)[-1]
        if is_cross(path, module):
            lines.setdefault(name, f'        "**.{name}": "local",  # keys and values are text that every rank holds')
        else:
            lines.setdefault(name, f'        "**.{name}": Attend(({streams})),')
    return list(lines.values())


def template(model: torch.nn.Module) -> str:
    """The plan as Python text; "" where no list of blocks has an attention whose processor can be set."""
    found = _first_blocks(model)
    if found is None:
        return ""
    path, block = found
    parameters = inspect.signature(block.forward).parameters
    tokens = next((name for name in parameters if name in ("hidden_states", "x", "img")), "hidden_states")
    cross = any(is_cross(name, child) for name, child in block.named_children())
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
    if _has_convolutions(model):
        lines.insert(2, "# it has convolutions: if they mix neighbouring tokens, it cannot be cut in this way")
    return "\n".join(lines) + "\n"
