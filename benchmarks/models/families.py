"""Every family by name, in the order of the tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from benchmarks.models import language, pretrained, vision
from benchmarks.models.case import Case

FAMILIES: dict[str, Callable[..., Iterator[Case]]] = {
    "bert": language.bert,
    "llama": language.llama,
    "mistral": language.mistral,
    "gpt2": language.gpt2,
    "gpt_oss": language.gpt_oss,
    "t5": language.t5,
    "vit": vision.vit,
    "swin": vision.swin,
    "whisper": vision.whisper,
    "diffusion": vision.diffusion,
}
ENCODER = "encoder"
NAMES = (*FAMILIES, ENCODER)


def cases(
    names: Collection[str], device: str, *, small: bool, encoder_folder: Path | None = None
) -> Iterator[Case]:
    """The cases of these families; the encoder's where its folder is given."""
    for name, make in FAMILIES.items():
        if name in names:
            yield from make(device, small=small)
    if ENCODER in names and encoder_folder is not None:
        yield from pretrained.cases(encoder_folder, copies=1 if small else 16)
