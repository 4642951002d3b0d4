"""An image by Flux, with its tokens spread over all ranks. On 8 GPUs:

    torchrun --nproc-per-node 8 examples/diffusers_flux.py --model black-forest-labs/FLUX.1-dev

Without --model the same code compares a tiny random Flux with one process; without torchrun, too, on 2 and 3 CPU ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

from ulysses_attention.diffusers import FAMILIES, parallelize
from ulysses_attention.launch import run_processes

PROMPT = "an astronaut rides a horse through a meadow, oil on canvas"
LOCAL_ONLY = dataclasses.replace(FAMILIES["FluxTransformer2DModel"], attention={"**": "local"})


def load(model: str | None, size: int) -> tuple[Any, dict[str, Any]]:
    """A pipeline and the arguments of its call, the same on every rank."""
    if model is not None:
        pipe = FluxPipeline.from_pretrained(model, torch_dtype=torch.bfloat16)
        return pipe, {"prompt": PROMPT, "height": size, "width": size}
    g = torch.Generator().manual_seed(1)
    text = {"prompt_embeds": torch.randn(1, 8, 8, generator=g), "pooled_prompt_embeds": torch.randn(1, 8, generator=g)}
    return tiny_pipeline(), text | {"height": 6, "width": 14, "num_inference_steps": 2}  # 21 image tokens


def tiny_pipeline() -> Any:
    """Two double-stream and two single-stream blocks, 3 heads; weights of unit gain, so that attention matters."""
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    vae = AutoencoderKL(block_out_channels=(4,), latent_channels=1, norm_num_groups=1, use_quant_conv=False,
                        use_post_quant_conv=False, shift_factor=0.1, scaling_factor=1.5)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in [*transformer.named_parameters(), *vae.named_parameters()]:
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(0.1 * noise + (0 if name.endswith("bias") else 1))  # norms near 1
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, transformer=transformer,
        text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None,
    )  # fmt: skip


def generate(pipe: Any, arguments: dict[str, Any], output_type: str) -> Any:
    """The images of one call, or their latents."""
    generator = torch.Generator().manual_seed(0)  # the same seed on every rank, so that all start from the same noise
    return pipe(**arguments, generator=generator, output_type=output_type).images


def draw(rank: int, group: Any, model: str | None, size: int, out: str) -> tuple[float, float] | None:
    """The image, saved by rank 0. Of the tiny model, the largest differences of latents to one process: ours, local."""
    on_gpu = dist.get_backend(group) == "nccl"
    pipe, arguments = load(model, size)
    pipe = pipe.to(torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")
    pipe.set_progress_bar_config(disable=rank != 0 or model is None)

    handle = parallelize(pipe, group)
    images = generate(pipe, arguments, "pil" if rank == 0 else "latent")  # the VAE runs on rank 0 only
    if rank == 0:
        images[0].save(out)
        print(f"saved {out}", flush=True)
    if model is not None:
        return None

    latents = generate(pipe, arguments, "latent")
    handle.remove()
    expected = generate(pipe, arguments, "latent")
    with parallelize(pipe, group, plan=LOCAL_ONLY):
        local = generate(pipe, arguments, "latent")
    return float((latents - expected).abs().max()), float((local - expected).abs().max())


def report(world: int, results: list[tuple[float, float]]) -> bool:
    ours, local = results[0]
    print(f"{world} ranks, 21 + 8 tokens, largest difference of the latents to one process:")
    print(f"   parallelize {ours:.1e}\n   local K/V   {local:.1e}, and no error")
    ok = all(ours <= 1e-4 < 1e-2 < local for ours, local in results)
    print("As expected." if ok else "NOT as expected.", flush=True)
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Flux pipeline, by name or folder; default: a tiny one with random weights")
    parser.add_argument("--size", type=int, default=1024, help="height and width of the model's image in pixels")
    parser.add_argument("--out", default="flux.png", help="where rank 0 saves the image")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        if options.model is not None:
            parser.error("--model needs torchrun: torchrun --nproc-per-node 8 examples/diffusers_flux.py --model NAME")
        ok = all(report(n, run_processes(draw, n, None, options.size, options.out)) for n in (2, 3))
    else:
        gpus = torch.cuda.is_available()
        if gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if gpus else "gloo")
        result = draw(dist.get_rank(), dist.group.WORLD, options.model, options.size, options.out)
        ok = result is None or dist.get_rank() != 0 or report(dist.get_world_size(), [result])
        dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
