"""The piped baseline: two GEMMs with a softmax between them, as attention is without fusion."""

from generator.core.family import Family
from generator.families.unfused.config import Unfused
from generator.families.unfused.rules import RULES
from generator.families.unfused.tiles import release, smoke, sweep

UNFUSED = Family(
    kernel=Unfused,
    rules=RULES,
    spaces={"smoke": smoke, "release": release, "sweep": sweep},
)
