"""ulysses_processor by itself: the caller shards the tokens and sets it through the model's own API."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from same_model import assert_output, call, call_without_gradient, family, processors_of, rebound_modules
from ulysses_attention import SequenceLayout, UlyssesContextParallelPolicy, run_ranks
from ulysses_attention.diffusers import Attend, ulysses_processor

EXACT = UlyssesContextParallelPolicy(require_seq_divisible=False)
LENGTHS = {"hidden_states": 21, "img_ids": 21, "encoder_hidden_states": 7, "txt_ids": 7}


def _own_inputs(inputs: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    layouts = {name: SequenceLayout(tokens, world, EXACT) for name, tokens in LENGTHS.items()}
    own = {name: layout.shard(inputs[name], rank, inputs[name].dim() - 2) for name, layout in layouts.items()}
    return inputs | own


@pytest.mark.parametrize("with_layout", [True, False])
@pytest.mark.parametrize("world", [2, 4])
def test_a_model_whose_tokens_the_caller_shards(world: int, with_layout: bool) -> None:
    wanted = family("flux")
    models: list[Any] = [copy.deepcopy(wanted.model) for _ in range(world)]
    image, text = (SequenceLayout(tokens, world, EXACT) for tokens in (21, 7))
    both = SequenceLayout.from_lengths(tuple(a + b for a, b in zip(image.lengths, text.lengths, strict=True)))

    def on_rank(rank: int, group: Any) -> None:
        model = models[rank]
        before = processors_of(model)["transformer_blocks.0.attn"]
        processor = ulysses_processor(before, group, layout=both if with_layout else None)
        assert isinstance(processor, type(before))
        inputs = _own_inputs(wanted.inputs, rank, world)
        local = call_without_gradient(model, inputs).view(2, -1, 4)
        model.set_attn_processor(processor)
        out = call(model, inputs).view(2, -1, 4)
        whole = image.gather(out.detach(), group, 1, grad="slice")
        assert_output(whole.flatten(), wanted.out)
        assert (local - out).abs().max() > 1e-2
        out.square().sum().backward()  # a loss over this rank's own tokens
        gradient = model.x_embedder.weight.grad
        group.allreduce([gradient]).wait()
        reference: Any = copy.deepcopy(wanted.model)
        call(reference, wanted.inputs).square().sum().backward()
        assert_output(gradient, reference.get_parameter("x_embedder.weight").grad)
        model.set_attn_processor(before)
        processor.retire()

    run_ranks(on_rank, world)
    assert not rebound_modules()


def test_options_of_the_processor() -> None:
    """A strategy, a kernel, and attention that stays local."""
    wanted = family("flux")
    models: list[Any] = [copy.deepcopy(wanted.model) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        model, inputs = models[rank], _own_inputs(wanted.inputs, rank, 2)
        before = processors_of(model)["transformer_blocks.0.attn"]
        local = call_without_gradient(model, inputs)
        gathered = ulysses_processor(before, group, strategy="allgather_kv", kernel="math")
        model.set_attn_processor(gathered)
        out = call_without_gradient(model, inputs).view(2, -1, 4)
        assert_output(SequenceLayout(21, 2, EXACT).gather(out, group, 1, grad="slice").flatten(), wanted.out)
        own = ulysses_processor(before, group, attends="local")
        model.set_attn_processor(own)
        assert torch.equal(call_without_gradient(model, inputs), local)
        gathered.retire()
        own.retire()

    run_ranks(on_rank, 2)


class Bmm:
    """Attention by hand in a file that has the dispatch, too: nothing could be exchanged."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = (f(hidden_states) for f in (attn.to_q, attn.to_k, attn.to_v))
        return (q @ k.transpose(1, 2)).softmax(-1) @ v


class InAMethod(Bmm):
    """Attention in a method of the class, in a function of the file, and in a function inside that."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.attend(*(f(hidden_states).unflatten(-1, (3, 16)) for f in (attn.to_q, attn.to_k, attn.to_v)))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _helper(q, k, v).flatten(2)


def _helper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    def run() -> torch.Tensor:
        return dispatch_attention_fn(q, k, v)

    return run()


from diffusers.models.attention_dispatch import dispatch_attention_fn  # noqa: E402  (what Bmm has and does not call)


def _refused(processor: Any, text: str, **options: Any) -> None:
    def on_rank(rank: int, group: Any) -> None:
        with pytest.raises((NotImplementedError, ValueError), match=text):
            ulysses_processor(processor, group, **options)

    run_ranks(on_rank, 1)
    assert not rebound_modules()


def test_processors_that_cannot_be_exchanged_are_refused() -> None:
    from diffusers.models.attention_processor import AttnProcessor, SanaLinearAttnProcessor2_0

    for processor in (Bmm(), AttnProcessor(), SanaLinearAttnProcessor2_0(), torch.nn.Linear(1, 1), len):
        _refused(processor, rf"attention of {type(processor).__name__} cannot be exchanged.*Fix: set another processor")


def test_an_exchanged_processor_is_refused() -> None:
    before = processors_of(family("flux").model)["transformer_blocks.0.attn"]

    def on_rank(rank: int, group: Any) -> None:
        ours = ulysses_processor(before, group)
        with pytest.raises(NotImplementedError, match="it is ours already"):
            ulysses_processor(ours, group)
        ours.retire()

    run_ranks(on_rank, 1)


def test_repeated_keys_need_the_attention() -> None:
    before = processors_of(family("lumina2").model)["layers.0.attn"]
    _refused(before, r"repeats_kv=True reads how often.*Fix: attention=module", attends=Attend((), repeats_kv=True))


def test_attention_in_a_method_is_exchanged() -> None:
    wanted, inputs = family("wan"), family("wan").inputs
    reference: Any = copy.deepcopy(wanted.model)
    reference.blocks[0].attn1.set_processor(InAMethod())
    tokens = inputs["hidden_states"].new_tensor(range(2 * 27 * 48)).view(2, 27, 48).sin()
    whole = reference.blocks[0].attn1(tokens)
    layout = SequenceLayout(27, 2, EXACT)
    attentions = [copy.deepcopy(reference.blocks[0].attn1) for _ in range(2)]

    def on_rank(rank: int, group: Any) -> None:
        processor = ulysses_processor(InAMethod(), group, layout=layout)
        attentions[rank].set_processor(processor)
        out = layout.gather(attentions[rank](layout.shard(tokens, rank)), group, 1, grad="slice")
        assert_output(out, whole)
        processor.retire()

    run_ranks(on_rank, 2)
