"""Causal language models of transformers on the ranks of a group, each of which holds a part of every sequence.

    from ulysses_attention.transformers import parallelize

    handle = parallelize(model, group)
    loss = model(input_ids=ids, labels=labels).loss  # the same ids on every rank; this rank's part of the loss
    loss.backward()                                  # then sum the parameter gradients over the group
    logits = handle.gather(model(input_ids=ids).logits, grad="slice")  # [B, S, vocabulary], on every rank
    handle.remove()

Every rank calls the model as one process would, with the whole input: it takes its own tokens, and attention sees all.
Loss:     labels are shifted before they are sharded and divided by the number of labels of all ranks (or by your
          num_items_in_batch), so the losses of the ranks *sum* to the loss of one process, and so do the parameter
          gradients. DistributedDataParallel averages gradients instead: multiply the loss by cp_size.
Padding:  attention_mask [B, S], on either side. Outputs of padding mean nothing: label -100, also for the first token
          behind padding on the left, which padding predicts.
Position: position_ids are built, 0 to S - 1, for models with rotary embeddings; others need them given.
Trainer:  it gives each process its own batch, counts num_items_in_batch over all processes and wraps the model in
          DistributedDataParallel. Give the ranks of one group the same batch, and a loss that sums over them.
Compile:  torch.compile(fullgraph=True) of the layers or the whole model, after parallelize. The whole model is compiled
          again for each length. Gradient checkpointing: recomputation sees the lengths and the padding of its own
          forward, whatever was called in between.
Refused, on every rank before attention communicates: generation and caches, packed documents, windows shorter than the
          sequence, attention dropout, 4-D masks, output_attentions, encoder-decoders, models that mix tokens by other
          means than attention, and arguments that are not known here. Also, by the first layer, models that do not hand
          their keyword arguments down to attention (StableLM and Nemotron, for instance).

Importing this registers attn_implementation="ulysses". A model that has it and was not parallelized raises when called.
Needs transformers 5.
"""

from __future__ import annotations

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "[ulysses_attention.transformers] transformers is not installed. Fix: pip install 'transformers>=5,<6'",
        name="transformers",
    ) from None

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"[ulysses_attention.transformers] transformers {transformers.__version__} passes attention other "
        f"arguments than this was written for. Fix: pip install 'transformers>=5,<6'"
    )

from ulysses_attention.transformers.attention import register
from ulysses_attention.transformers.handle import Handle, parallelize

register()

__all__ = ["Handle", "parallelize"]
