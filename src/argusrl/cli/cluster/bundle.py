"""argusrl cluster bundle: wheels and list of images for a cluster without internet."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Target(StrEnum):
    gpu = "gpu"
    cpu = "cpu"


def register(app: typer.Typer) -> None:
    """Add the sub-verb."""

    @app.command("bundle")
    def bundle(
        output: Annotated[Path, typer.Option("--output", help="Folder for wheels, checksums and list of images.")],
        target: Annotated[Target, typer.Option("--target", help="For nodes with GPUs, or without.")] = Target.gpu,
        source: Annotated[Path, typer.Option("--source", help="Checkout of argusrl.")] = Path(),
        image: Annotated[str | None, typer.Option("--image", help="argusrl's image as your pods pull it.")] = None,
        python_version: Annotated[str, typer.Option("--python-version", help="Python of the cluster.")] = "3.11",
    ) -> None:
        """Collect what a cluster without internet needs: pinned wheels with checksums, and which images to mirror."""
        from argusrl.cli.output import say
        from argusrl.cluster.bundle import make_bundle

        made = make_bundle(output, source.absolute(), target.value, image or _image(target), python_version)
        say(
            f"✓ {made.folder}: {made.wheels} wheels, {made.size_bytes / 1e9:.1f} GB; README.md there says how to go on",
            "green",
        )
        for name in made.images:
            say(f"  {name}")


def _image(target: Target) -> str:
    from importlib.metadata import version

    return f"argusrl:{version('argusrl')}-{target.value}"
