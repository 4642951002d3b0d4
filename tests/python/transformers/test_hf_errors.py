"""What cannot be honoured is refused on every rank before attention communicates, with a fix."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import SIZES, inputs_of, new_model
from torch.distributed.device_mesh import init_device_mesh

import ulysses_attention as ua
from ulysses_attention.launch import ProcessRanks
from ulysses_attention.transformers import parallelize

llama = functools.partial(new_model, "llama")
IDS = inputs_of("plain")["input_ids"]
CUT = torch.tensor([[*range(4), *range(9)]]).expand(2, -1)


def refusals(world: int, call: Any) -> list[str]:
    """The message of every rank. A rank that communicated would wait for the others, one by one."""
    messages = []
    for rank in range(world):  # one after the other: so a rank that communicates before it raises ends by timeout

        def on_rank(asked: int, group: Any, rank: int = rank) -> str:
            if asked != rank:
                return ""
            with pytest.raises((NotImplementedError, ValueError, RuntimeError)) as caught:
                call(group)
            return str(caught.value)

        messages.append(ua.run_ranks(on_rank, world, timeout_s=2.0)[rank])
    return messages


def assert_refused(given: dict[str, Any], words: list[str], make: Any = llama, **options: Any) -> None:
    def call(group: Any) -> None:
        model = make()
        parallelize(model, group, **options)
        model(**given)

    messages = refusals(2, call)
    assert messages[0] == messages[1]
    for word in (*words, "Fix: "):
        assert word in messages[0], messages[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"use_cache": True}, ["use_cache is given", "Fix: handle.remove(), then generate", "(use_cache=False)"]),
        ({"past_key_values": transformers.DynamicCache()}, ["past_key_values is given", "inside training no cache"]),
        ({"output_attentions": True}, ["output_attentions is given", "known are input_ids"]),
        ({"logits_to_keep": 1}, ["logits_to_keep is given", "handle.gather(logits)"]),
        ({"token_type_ids": torch.zeros_like(IDS)}, ["token_type_ids is given", "leave it out"]),
        (
            {"attention_mask": torch.ones(2, 1, 13, 13)},
            ["attention_mask is a tensor of shape [2, 1, 13, 13]", "[2, 13]"],
        ),
        ({"attention_mask": torch.ones(2, 12)}, ["attention_mask is a tensor of shape [2, 12]", "[2, 13]"]),
        ({"position_ids": torch.arange(12)[None]}, ["position_ids is a tensor of shape [1, 12]", "[2, 13]"]),
        ({"position_ids": CUT}, ["2 documents of one row", "one document a row", "[CP045]"]),
        ({"inputs_embeds": torch.zeros(2, 13, 48)}, ["both given, or neither", "exactly one"]),
        ({"shift_labels": IDS}, ["shift_labels without labels", "labels=shift_labels"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_shards_cannot_honour(given: dict[str, Any], words: list[str]) -> None:
    assert_refused({"input_ids": IDS, **given}, words)


def test_documents_are_read_as_transformers_reads_them() -> None:
    """With an attention_mask jumps in position_ids are no documents: positions of padding do not count on."""
    given = inputs_of("left")
    positions = (given["attention_mask"].cumsum(1) - 1).clamp(min=1)
    assert bool((positions.diff(dim=1) != 1).any())

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        model = llama()
        handle = parallelize(model, group)
        return handle.gather(model(**given, position_ids=positions).logits, grad="slice")

    expected = llama()(**given, position_ids=positions).logits
    rows = given["attention_mask"].bool()
    for got in ua.run_ranks(on_rank, 2):
        assert (got - expected)[rows].abs().max() <= 2e-5 * expected[rows].abs().max()


def test_generation_is_out_of_scope() -> None:
    def call(group: Any) -> None:
        model = llama().eval()
        parallelize(model, group)
        model.generate(IDS, max_new_tokens=2)

    fix = "generate() is called. Fix: handle.remove(), then generate on one process; inside training no cache"
    assert all(fix in text for text in refusals(2, call))


@pytest.mark.parametrize("name", ["gemma3", "gemma2"])
def test_cp041_a_window_shorter_than_the_sequence_is_refused_at_the_root(name: str) -> None:
    words = ["sliding window of 4 and seq_len=13", "at most 4 tokens", "[CP041]"]
    assert_refused({"input_ids": IDS}, words, functools.partial(new_model, name, sliding_window=4))


def test_cp041_a_window_that_comes_later_is_refused_by_the_operation() -> None:
    def on_rank(rank: int, group: Any) -> str:
        model = new_model("gemma3")
        parallelize(model, group)
        model.model.layers[0].self_attn.sliding_window = 4
        with pytest.raises(NotImplementedError) as caught:
            model(input_ids=IDS)
        return str(caught.value)

    assert all("[CP041]" in text for text in ua.run_ranks(on_rank, 2))


def test_cp042_attention_dropout_is_refused_in_training_only() -> None:
    make = functools.partial(new_model, "llama", attention_dropout=0.1)
    assert_refused({"input_ids": IDS}, ["attention dropout is 0.1", "attention_dropout=0.0", "[CP042]"], make)

    def in_eval(rank: int, group: Any) -> torch.Size:
        model = make().eval()
        parallelize(model, group)
        return model(input_ids=IDS).logits.shape

    assert ua.run_ranks(in_eval, 2) == [(2, 7, 64), (2, 6, 64)]


def test_rotation_that_depends_on_the_length_is_refused_beyond_its_limit() -> None:
    make = functools.partial(new_model, "llama", rope_parameters=DYNAMIC, max_position_embeddings=8)
    assert_refused({"input_ids": IDS}, ["seq_len=13 is beyond 8", "at most 8 tokens"], make)


def test_fewer_tokens_than_ranks_are_refused_with_the_number() -> None:
    assert_refused(
        {"input_ids": IDS[:, :1]}, ["leaves 1 of 2 ranks", "at least 2 tokens, at most 1 rank,", "pad_multiple=1"]
    )


@pytest.mark.parametrize(("pad_multiple", "error"), [(1, "[CP010]"), (2, "[CP011]")])
def test_a_strict_policy_refuses_lengths_as_everywhere(pad_multiple: int, error: str) -> None:
    policy = ua.UlyssesContextParallelPolicy(auto_pad=False, pad_multiple=pad_multiple)
    ids = IDS if pad_multiple == 1 else IDS[:, :10]
    assert_refused({"input_ids": ids}, [error], policy=policy)


def test_a_model_that_is_not_parallelized_or_no_longer_never_runs_alone() -> None:
    untouched = llama()
    untouched.set_attn_implementation("ulysses")
    with pytest.raises(RuntimeError, match=r"tokens only. Fix: call the model that was given to parallelize"):
        untouched(input_ids=IDS)

    def call(group: Any) -> None:
        model = llama()
        model.set_attn_implementation("ulysses")
        with parallelize(model, group):
            assert model.generate is not None
        model(input_ids=IDS)

    def part(group: Any) -> None:
        model = llama()
        parallelize(model, group)
        model.model(input_ids=IDS)

    for refused in (call, part):
        assert all("would see this rank's tokens only" in text for text in refusals(2, refused))


def test_another_attention_set_afterwards_is_noticed() -> None:
    def call(group: Any) -> None:
        model = llama()
        parallelize(model, group)
        model.set_attn_implementation("sdpa")
        model(input_ids=IDS)

    assert all('attends by "sdpa"' in text for text in refusals(2, call))


def test_a_copy_of_the_model_ends_with_the_handle() -> None:
    def call(group: Any) -> None:
        model = llama()
        handle = parallelize(model, group)
        duplicate = copy.deepcopy(model)
        handle.remove()
        duplicate(input_ids=IDS)

    assert all("handle was removed" in text for text in refusals(2, call))


def test_a_second_parallelize_is_refused() -> None:
    def call(group: Any) -> None:
        model = llama()
        parallelize(model.model, group)
        parallelize(model, group)

    assert all("parallelized already. Fix: remove()" in text for text in refusals(2, call))


BERT = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "intermediate_size": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
JAMBA = {"use_mamba_kernels": False, "num_experts": 2, "mamba_d_state": 4}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES)), ["pools over"]),
        (lambda: transformers.LlamaForQuestionAnswering(transformers.LlamaConfig(**SIZES)), ["pools over"]),
        (lambda: transformers.BertModel(transformers.BertConfig(**BERT)),
         ["pools over", "(...ForCausalLM), or a ...Model without a pooling head (add_pooling_layer=False)"]),
        (lambda: transformers.T5Model(transformers.T5Config(d_model=48, d_kv=8, d_ff=64, num_layers=1, num_heads=6,
                                                            vocab_size=64)), ["attends to an encoder's tokens"]),
        (lambda: transformers.JambaForCausalLM(transformers.JambaConfig(**{**SIZES, **JAMBA})), ["Conv1d"]),
        (lambda: transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**SIZES, num_local_experts=2)),
         ["mixes tokens by chunked_attention"]),
        (lambda: transformers.MptForCausalLM(transformers.MptConfig(d_model=48, n_heads=6, n_layers=1, vocab_size=64)),
         ["is made of attn_config"]),
        (lambda: transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=48, n_head=6, n_layer=1,
                                                                        vocab_size=64)), ["takes no position_ids"]),
        (lambda: new_model("gemma3", rope_parameters={"full_attention": DYNAMIC, "sliding_attention": DYNAMIC}),
         ["rotations that depend on the length", "yarn"]),
        (lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=2,
                                                                            output_router_logits=True)),
         ["[parallelize] MixtralForCausalLM adds a loss of its routers", "Fix: output_router_logits=False"]),
    ],
    ids=["classification", "answering", "pooler", "encoder-decoder", "mamba", "chunks", "configs", "alibi", "rope",
         "routers"],
)  # fmt: skip
def test_models_that_would_differ_on_shards_are_refused_at_once(make: Any, words: list[str]) -> None:
    model = make()
    before = model.config._attn_implementation
    (message, _) = refusals(2, lambda group: parallelize(model, group))
    for word in (*words, "Fix: "):
        assert word in message, message
    assert model.config._attn_implementation == before and not model._forward_pre_hooks


def test_only_models_of_transformers_and_groups() -> None:
    def call(group: Any) -> None:
        with pytest.raises(TypeError, match=r"a Linear, not a model of transformers\. Fix: the PreTrainedModel itself"):
            parallelize(torch.nn.Linear(2, 2), group)
        parallelize(llama(), "cp")

    assert all("[CP063]" in text for text in refusals(2, call))


def _over_two_dimensions(rank: int, group: Any) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    model = llama()
    with pytest.raises(NotImplementedError) as caught:
        parallelize(model, mesh)
    assert not model._forward_pre_hooks
    with parallelize(model, mesh["ulysses"]):
        assert model(input_ids=IDS).logits.shape == (2, 7 - rank, 64)
    return str(caught.value)


def test_cp047_a_mesh_of_two_dimensions_is_refused(gloo: Callable[[int], ProcessRanks]) -> None:
    for text in gloo(2).run(_over_two_dimensions):
        assert 'the mesh is 2-D. Fix: one of its dimensions, mesh["name"]. [CP047]' in text


@pytest.mark.parametrize(
    ("version", "words"),
    [("4.57.0", "transformers 4.57.0 passes attention other arguments"), ("", "transformers is not installed")],
)
def test_without_transformers_5_the_import_says_what_to_install(version: str, words: str, tmp_path: Path) -> None:
    """Under a stand-in of that version, or under none at all."""
    stand_in = f"types.ModuleType('transformers'); sys.modules['transformers'].__version__ = {version!r}"
    code = f"import sys, types; sys.modules['transformers'] = {stand_in if version else None}; "
    done = subprocess.run(
        [sys.executable, "-c", code + "import ulysses_attention.transformers"], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert words in done.stderr and "Fix: pip install 'transformers>=5,<6'" in done.stderr
