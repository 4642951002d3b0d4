"""Steps of training through a parallelized model, its lengths and policies, and that remove() undoes it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from tiny_models import Result, alone, assert_same, gathered, grads_of, inputs_of, new_model, on_ranks, summed
from torch.nn.functional import cross_entropy

import ulysses_attention as ua
from ulysses_attention.transformers import parallelize

llama = functools.partial(new_model, "llama")
EXACT = ua.UlyssesContextParallelPolicy(require_seq_divisible=False)


def test_accumulation_divides_by_the_callers_number_of_labels() -> None:
    """Two batches of unlike length; num_items_in_batch counts the labels of both, as Trainer does."""
    batches = [inputs_of("plain", 13), inputs_of("partly", 9)]
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)

    def accumulated(model: Any) -> Result:
        losses = []
        for batch in batches:
            losses.append(model(**batch, num_items_in_batch=count).loss)
            losses[-1].backward()
        return Result(torch.stack(losses).sum().detach(), torch.ones(2, 13, 1), grads_of(model))

    def on_rank(rank: int, group: Any) -> Result:
        model = llama()
        parallelize(model, group)
        return accumulated(model)

    assert_same(summed(ua.run_ranks(on_rank, 2)), accumulated(llama()), batches[0])


def test_given_shift_labels_are_taken_as_they_are() -> None:
    given = inputs_of("plain")
    shifted = given["labels"].flip(1)  # no shift of the labels
    shifted[0, :4] = -100
    expected = alone(llama(), {**given, "shift_labels": shifted})
    assert (expected.loss - alone(llama(), given).loss).abs() > 1e-2
    assert_same(on_ranks(2, llama, {**given, "shift_labels": shifted}), expected, given)


def test_embeddings_in_place_of_ids_get_their_gradient() -> None:
    given = inputs_of("right")
    embeds = torch.randn(2, 13, 48, generator=torch.Generator().manual_seed(3))

    def run(model: Any) -> Result:
        leaf = embeds.clone().requires_grad_()
        out = model(inputs_embeds=leaf, attention_mask=given["attention_mask"], labels=given["labels"])
        out.loss.backward()
        assert leaf.grad is not None
        return Result(out.loss.detach(), out.logits.detach(), {**grads_of(model), "embeds": leaf.grad})

    def on_rank(rank: int, group: Any) -> Result:
        model = llama()
        handle = parallelize(model, group)
        result = run(model)
        return result._replace(logits=gathered(handle, result.logits))

    assert_same(summed(ua.run_ranks(on_rank, 4)), run(llama()), given)


@pytest.mark.parametrize("grad", ["slice", "sum"])
def test_a_loss_of_gathered_logits_gives_the_gradients_of_one_process(grad: Any) -> None:
    given = inputs_of("plain")
    labels = given.pop("labels")

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.logsumexp(1).square().mean()

    model = llama()
    logits = model(**given).logits
    loss_of(logits).backward()
    expected = Result(torch.zeros(()), logits.detach(), grads_of(model))

    def on_rank(rank: int, group: Any) -> Result:
        model = llama()
        handle = parallelize(model, group)
        logits = handle.gather(model(**given).logits, grad=grad)
        (loss_of(logits) / (1 if grad == "slice" else 2)).backward()
        return Result(torch.zeros(()), logits.detach(), grads_of(model))

    assert_same(summed(ua.run_ranks(on_rank, 2)), expected, given)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_sees_the_facts_of_its_own_forward(reentrant: bool) -> None:
    """Two forwards of unlike length and padding stand before one backward, with gradient checkpointing."""
    batches = [inputs_of("right", 13), inputs_of("plain", 9)]
    recomputed = []

    def run(model: Any) -> Result:
        loss = torch.stack([model(**batch, num_items_in_batch=7).loss for batch in batches]).sum()
        loss.backward()
        return Result(loss.detach(), torch.ones(2, 13, 1), grads_of(model))

    def on_rank(rank: int, group: Any) -> Result:
        model = llama()
        parallelize(model, group)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.model.layers[0].self_attn.register_forward_hook(lambda *_: recomputed.append(rank))
        return run(model)

    assert_same(summed(ua.run_ranks(on_rank, 2)), run(llama()), batches[0])
    assert len(recomputed) == 2 * 2 * 2  # ranks × batches × (forward and again in backward)


def test_under_autocast_the_ranks_are_as_near_to_float32_as_one_process() -> None:
    given = inputs_of("right")
    rows = given["attention_mask"].bool()
    exact = alone(llama(), given).logits

    def logits_of(model: Any) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(**given).logits

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        model = llama()
        with parallelize(model, group) as handle:
            logits = logits_of(model)
            assert logits.dtype == torch.bfloat16
            return gathered(handle, logits)

    (logits, _), one = ua.run_ranks(on_rank, 2), logits_of(llama())
    error, of_one = ((x.float() - exact)[rows].abs().max() for x in (logits, one))
    assert 0.0 < error <= 2.0 * of_one


@pytest.mark.parametrize(
    ("seq_len", "policy"),
    [(13, None), (16, None), (4, None), (13, EXACT), (13, ua.UlyssesContextParallelPolicy()),
     (13, ua.UlyssesContextParallelPolicy(pad_multiple=1)), (3, ua.UlyssesContextParallelPolicy(pad_multiple=1))],
    ids=["13", "16", "a token each", "exact", "padded to 32", "padded to 16", "fewer tokens than ranks"],
)  # fmt: skip
def test_every_length_and_policy_equals_one_process(seq_len: int, policy: Any) -> None:
    given = inputs_of("plain", seq_len)
    assert_same(on_ranks(4, llama, given, policy=policy), alone(llama(), given), given)


def test_a_mask_where_ranks_have_as_many_tokens_as_the_batch_has_rows() -> None:
    given = inputs_of("right")
    assert ua.SequenceLayout(13, 7, EXACT).lengths[0] == given["attention_mask"].shape[0]
    assert_same(on_ranks(7, llama, given), alone(llama(), given), given)


def _mixed_precision(rank: int, group: Any) -> tuple[float, float]:
    """The loss of all ranks under fully_shard in half precision, and that of one process."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    given, model = inputs_of("right"), llama()
    parallelize(model, group)
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    loss = model(**given).loss
    loss.backward()
    total = loss.detach().float().reshape(1)
    group.allreduce([total]).wait()
    return total.item(), alone(llama(), given).loss.item()


def test_fully_shard_with_mixed_precision(gloo: Any) -> None:
    for loss, expected in gloo(2).run(_mixed_precision):
        assert loss == pytest.approx(expected, rel=2e-2)


def test_the_layout_is_that_of_the_last_forward_and_known_before() -> None:
    def on_rank(rank: int, group: Any) -> None:
        model = llama()
        handle = parallelize(model, group)
        with pytest.raises(RuntimeError, match="not called yet"):
            _ = handle.layout
        assert handle.layout_for(13).lengths == (7, 6)
        first = model(**inputs_of("plain", 13)).logits
        assert first.shape[1] == handle.layout.lengths[rank] == (7, 6)[rank]
        model(**inputs_of("plain", 8))
        assert handle.layout.lengths == (4, 4)
        assert handle.gather(first, grad="slice", layout=handle.layout_for(13)).shape[1] == 13

    ua.run_ranks(on_rank, 2)


def test_positions_that_do_not_start_at_zero_and_positional_arguments() -> None:
    given = inputs_of("plain")
    positions = torch.arange(100, 113)[None]
    plain, expected = (alone(llama(), {**given, **more}) for more in ({}, {"position_ids": positions}))
    assert_same(expected, plain, given)  # rotation is relative: so a rank that began at 0 again would show

    def on_rank(rank: int, group: Any) -> Result:
        model = llama()
        handle = parallelize(model, group)
        out = model(given["input_ids"], None, positions, labels=given["labels"])
        out.loss.backward()
        return Result(out.loss.detach(), gathered(handle, out.logits), grads_of(model))

    assert_same(summed(ua.run_ranks(on_rank, 2)), expected, given)


def test_two_models_with_different_groups_run_at_once() -> None:
    """The layers of one run between those of the other, on other lengths, and the smaller group has one rank."""
    long, short = inputs_of("right", 13), inputs_of("left", 9)
    qwen = functools.partial(new_model, "qwen3")

    def on_rank(rank: int, group: Any) -> list[Result]:
        def on_its_own(_: int, single: Any) -> Any:
            first, second = llama(), qwen()
            handle, _ = parallelize(first, group), parallelize(second, single)
            inner: list[Any] = []
            first.model.layers[0].register_forward_hook(lambda *_: inner.append(second(**short)))
            out = first(**long)
            (out.loss + inner[0].loss).backward()
            return (
                Result(out.loss.detach(), gathered(handle, out.logits), grads_of(first)),
                Result(inner[0].loss.detach(), inner[0].logits.detach(), grads_of(second)),
            )

        return ua.run_ranks(on_its_own, 1)[0]

    parts = ua.run_ranks(on_rank, 2)
    assert_same(summed([first for first, _ in parts]), alone(llama(), long), long)
    for _, second in parts:
        assert_same(second, alone(qwen(), short), short)


def test_the_base_model_gives_the_hidden_states_of_its_rows() -> None:
    given = {"input_ids": inputs_of("plain")["input_ids"]}
    with torch.no_grad():
        expected = llama().model(**given).last_hidden_state

    def on_rank(rank: int, group: Any) -> torch.Tensor:
        model = llama().model
        handle = parallelize(model, group)
        return gathered(handle, model(**given).last_hidden_state)

    for got in ua.run_ranks(on_rank, 2):
        assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_remove_restores_the_model_bit_for_bit(name: str) -> None:
    given = inputs_of("right")
    before, model = alone(new_model(name), given), new_model(name)
    state, config, attributes = copy.deepcopy(model.state_dict()), copy.deepcopy(model.config), set(vars(model))
    ran = ua.run_ranks(lambda rank, group: _run_and_remove(model, group, given), 1)
    assert ran == [True]
    after = alone(model, given)
    assert torch.equal(after.loss, before.loss) and torch.equal(after.logits, before.logits)
    assert all(torch.equal(after.grads[key], before.grads[key]) for key in before.grads)
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
    assert model.config.to_dict() == config.to_dict()
    assert model.config._attn_implementation == config._attn_implementation == "eager"
    assert set(vars(model)) == attributes and not model._forward_pre_hooks
    assert model.generate.__func__ is type(model).generate


def _run_and_remove(model: Any, group: Any, given: dict[str, Any]) -> bool:
    handle = parallelize(model, group)
    model(**given)
    is_changed = model.config._attn_implementation == "ulysses" and bool(model._forward_pre_hooks)
    handle.remove()
    handle.remove()
    return is_changed
