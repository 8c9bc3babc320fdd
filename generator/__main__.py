"""`python -m generator`: writes the units of a space, lists its kernels, checks a folder, explains a kernel.

Exit codes: 0 done; 1 `--check` found the folder stale; 2 the request makes no sense (stderr says why).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from generator.core.kernel import Kernel
from generator.core.space import SPACES, IllegalTileError, Space
from generator.core.tags import InvalidNameError
from generator.families import FAMILIES

EXIT_STALE = 1
EXIT_USAGE = 2


class RequestError(Exception):
    """What was asked for makes no sense; the text says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.explain is not None:
            return _explain(arguments.explain)
        chosen = _space(arguments.space, arguments.families, arguments.filter)
        if arguments.list or arguments.rejected:
            return _list(chosen, rejected=arguments.rejected)
        return _generate(chosen, Path(arguments.out), check=arguments.check)
    except (RequestError, InvalidNameError, IllegalTileError) as error:
        print(f"generator: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # `--list | head`
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m generator",
        description="Writes the C++ units that instantiate attention kernels. generator/families says which.",
        epilog="exit codes: 0 done, 1 --check found the folder stale, 2 wrong usage",
    )
    parser.add_argument("--out", metavar="DIR", default="build/generated", help="default: %(default)s")
    parser.add_argument("--space", metavar="|".join(SPACES), default="release", help="default: %(default)s")
    parser.add_argument(
        "--filter",
        metavar="GLOBS",
        help="only the kernels whose names match one of these, comma-separated, e.g. '*_d64_*_f16'",
    )
    parser.add_argument(
        "--families", metavar="NAMES", help=f"only these, comma-separated, of {', '.join(FAMILIES.names)}"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="print the kernels' names, write nothing")
    action.add_argument(
        "--rejected", action="store_true", help="print what the rules keep out of the space, and why"
    )
    action.add_argument("--check", action="store_true", help="exit 1 when DIR is stale, write nothing")
    action.add_argument(
        "--explain", metavar="NAME", help="print every rule's verdict and the resources of a kernel"
    )
    return parser


def _space(name: str, families: str | None, globs: str | None) -> Space:
    if name not in SPACES:
        raise RequestError(f"unknown space {name!r}; there are {', '.join(SPACES)}")
    chosen = FAMILIES.build(name)
    if families is not None:
        wanted = families.split(",")
        for family in wanted:
            if family not in FAMILIES.names:
                raise RequestError(f"unknown family {family!r}; there are {', '.join(FAMILIES.names)}")
        chosen = chosen.of_families(wanted)
    if globs is None:
        return chosen
    chosen = chosen.filtered(globs)
    if not chosen.kernels and not chosen.rejected:
        raise RequestError(f"no kernel of space {name} matches {globs!r}; --list prints their names")
    return chosen


def _list(chosen: Space, *, rejected: bool) -> int:
    if rejected:
        lines = [f"{entry.config.name}: {entry.reason}" for entry in chosen.rejected]
    else:
        lines = [config.name for config in chosen.kernels]
    for line in lines:
        print(line)
    return 0


def _generate(chosen: Space, out: Path, *, check: bool) -> int:
    from generator.core import render, writer  # Jinja is the only thing here that takes time to import

    if not chosen.kernels:
        raise RequestError(
            f"the rules refuse every kernel that matches {chosen.filter!r}; --rejected says why"
        )
    files = render.render(chosen, render.Sources.load())
    try:
        difference = writer.compare(files, out) if check else writer.write(files, out)
    except (writer.ForeignFileError, OSError) as error:
        raise RequestError(str(error)) from error
    for note in difference.notes:
        print(f"generator: note: {note}", file=sys.stderr)
    units = {config.unit for config in chosen.kernels}
    what = f"{len(chosen.kernels)} kernels in {len(units)} units, space {chosen.name}"
    if not difference:
        print(f"{out}: up to date, nothing written ({what})")
        return 0
    if check:
        print(f"{out}: stale ({what})", *difference.lines(), sep="\n  ")
        return EXIT_STALE
    written = len(difference.missing) + len(difference.changed)
    print(f"{out}: wrote {written} files, deleted {len(difference.stale)} ({what})")
    return 0


def _explain(name: str) -> int:
    config = FAMILIES.parse(name)
    reason = FAMILIES.refusal(config)
    spaces = [space for space in SPACES if config in FAMILIES.build(space).kernels]
    print(config.name)
    print(f"  {'legal' if reason is None else 'illegal'}; in the spaces: {', '.join(spaces) or 'none'}")
    print("rules")
    for rule in FAMILIES.of(config).rules:
        why_not = rule.why_not(config)
        verdict, text = ("ok", rule.statement) if why_not is None else ("REFUSED", why_not)
        print(f"  {verdict:<8} {rule.name:<22} {text}")
    print(f"resources of {config.measured}")
    for label, value in _resources(config):
        print(f"  {label:<18} {value}")
    return 0


def _resources(config: Kernel) -> list[tuple[str, str]]:
    limits = config.arch.limits
    room = ", ".join(f"{what} {count}" for what, count in config.ctas_per_sm_by.items())
    registers = f"about {config.registers} of {limits.registers_for(config.tile.threads)} a thread"
    registers += f" (accumulators {config.accumulator_registers})"
    return [
        ("unit", config.unit),
        ("threads", str(config.tile.threads)),
        ("smem_bytes", f"{config.smem_bytes} of {limits.smem_per_cta}"),
        ("registers", registers),
        ("ctas_per_sm", f"{config.ctas_per_sm} (room by {room})"),
    ]


if __name__ == "__main__":
    sys.exit(main())
