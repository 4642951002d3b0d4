"""The registered functions, called as a model's layer calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import inputs_of, new_model, wake

import ulysses_attention as ua
from ulysses_attention.transformers import parallelize
from ulysses_attention.transformers.attention import ShardedCall, attention, no_mask

UNKNOWN = "which this attention does not know"


def messages(
    world: int = 2,
    key_len: int = 4,
    policy: Any = None,
    strategy: str = "ulysses",
    attention_mask: torch.Tensor | None = None,
    **given: Any,
) -> list[str]:
    """What every rank raises when a layer asks for `given`."""

    def on_rank(rank: int, group: Any) -> str:
        call = ShardedCall(group, ua.SequenceLayout.from_lengths([4] * world), None, policy, strategy, "auto", "auto")
        q, k = torch.ones(1, 2, 4, 8), torch.ones(1, 2, key_len, 8)
        with pytest.raises((NotImplementedError, ValueError)) as caught:
            attention(torch.nn.Identity(), q, k, k, attention_mask, ulysses=call, **given)
        return str(caught.value)

    return ua.run_ranks(on_rank, world)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dropout": 0.1}, "[CP042]"),
        ({"sliding_window": 7}, "[CP041]"),
        ({"strategy": "other"}, "[CP030]"),
        ({"policy": ua.UlyssesContextParallelPolicy(backend_name="other")}, "[CP001]"),
        ({"position_bias": torch.zeros(1, 2, 4, 4)}, f"is asked for position_bias, {UNKNOWN}"),
        ({"head_mask": torch.ones(2), "cu_seq_lens_q": torch.ones(2)}, f"for head_mask, cu_seq_lens_q, {UNKNOWN}"),
        ({"key_len": 6}, f"has 4 queries, 6 keys, {UNKNOWN}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_layer_asks_for_is_honoured_or_refused_on_every_rank(given: dict[str, Any], words: str) -> None:
    for text in messages(**given):
        assert words in text and "Fix: " in text


def test_a_mask_that_a_model_made_itself_is_refused() -> None:
    (text,) = messages(1, attention_mask=torch.zeros(1, 1, 4, 4))
    assert f"is asked for attention_mask, {UNKNOWN}" in text
    with pytest.raises(NotImplementedError, match="lays a mask of its own over the causal one"):
        no_mask(batch_size=1, use_vmap=True)
    assert no_mask(batch_size=1, use_vmap=False, allow_is_causal_skip=False) is None


def gpt2() -> Any:
    sizes = {"n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 6, "vocab_size": 64}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))


def bert() -> Any:
    """Not causal: every token sees all."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 64}
    return transformers.BertLMHeadModel(transformers.BertConfig(vocab_size=64, **sizes)).eval()


def woken(make: Any) -> Any:
    model = make()
    wake(model)
    return model


@pytest.mark.parametrize("make", [gpt2, bert])
def test_models_that_count_positions_in_their_own_way_need_them_given(make: Any) -> None:
    ids = inputs_of("plain")["input_ids"]

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        model = woken(make)
        handle = parallelize(model, group)
        with pytest.raises(ValueError, match=r"position_ids is not given.*Fix: position_ids.*torch\.arange\(13\)"):
            model(input_ids=ids)
        return handle.gather(model(input_ids=ids, position_ids=torch.arange(13)[None]).logits, grad="slice")

    expected = woken(make)(input_ids=ids).logits
    for got in ua.run_ranks(on_rank, 2):
        assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_labels_of_a_model_with_a_loss_of_its_own_are_refused() -> None:
    def on_rank(rank: int, group: Any) -> str:
        model = new_model("llama")
        model.loss_function = lambda **given: given["logits"].sum()
        parallelize(model, group)
        with pytest.raises(NotImplementedError) as caught:
            model(**inputs_of("plain"))
        return str(caught.value)

    for text in ua.run_ranks(on_rank, 2):
        assert "computes its loss in its own way. Fix: handle.gather(logits) and your loss" in text
