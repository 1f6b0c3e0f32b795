"""What all benchmark scripts do around their measurement: arguments, JSON, plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax


def parser(doc: str, rounds: int) -> argparse.ArgumentParser:
    """Options that all scripts have. `doc`: the script's docstring; `rounds`: the default."""
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--json", help="write the result here")
    options.add_argument("--plot", help="draw the result here (needs matplotlib)")
    options.add_argument("--from", dest="source", help="draw this JSON instead of measuring")
    options.add_argument("--rounds", type=int, default=rounds)
    return options


def run(
    arguments: argparse.Namespace,
    measure: Callable[[], dict[str, Any]],
    draw: Callable[[dict[str, Any], str], None],
) -> None:
    """Measure or read, write and draw, as the arguments say; the device's name is added."""
    if arguments.source:
        with open(arguments.source) as file:
            result = json.load(file)
    else:
        result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, **measure()}
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    if arguments.plot:
        draw(result, arguments.plot)
