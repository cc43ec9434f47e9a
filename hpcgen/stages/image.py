"""The stage image: runs enroot/build-image.sh on one node. The script contains it and the files that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from hpcgen.config.container import is_image_file
from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.inputs import Input
from hpcgen.planning.kind import Stage, Work
from hpcgen.resources import shipped
from trainer.contract.config import TrainerConfig

DEEPSPEED_PACKAGES = "deepspeed.txt"
RECIPE = ("build-image.sh", "install-inside.sh", "health_check.py")


class Image(Stage):
    """Builds the container image of the other stages."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """The arguments and files for build-image.sh."""
        image, output, code = config.image, _output(run, config), _code(run, config)
        topology = _topology(run)
        options = {
            "--output": output,
            "--base": image.base,
            "--code": code,
            "--megatron-core": image.megatron_core,
            "--megatron-deepspeed": image.megatron_deepspeed,
            "--doca": image.doca,
            "--need": None if image.need is None else ",".join(image.need),
            # the script prepends its own directory to a file name
            "--topology": None if topology else "none",
        }
        given = [f"{option}={value}" for option, value in options.items() if value is not None]
        if image.deepspeed:
            given.append("--deepspeed")
        packages = [
            f"--package={name}" for name in image.packages or (() if image.packages is None else ("none",))
        ]
        folder = shipped("enroot")
        recipe = (*RECIPE, *([DEEPSPEED_PACKAGES] if image.deepspeed else []))
        directories = [path for path in (code, image.megatron_deepspeed) if path]
        return Work(
            arguments=(*given, *packages),
            inputs=tuple(map(Input, (*([image.base] if is_image_file(image.base) else []), *directories))),
            reads=tuple(directories),
            writes=(str(PurePosixPath(output).parent),),
            files={name: (folder / name).read_text(encoding="utf-8") for name in recipe} | topology,
            values={"topology": next(iter(topology), "")},
        )

    def problems(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields settings that are missing or conflict."""
        image, code = config.image, _code(run, config)
        if not _output(run, config):
            reason = "is not set, and container.image is not a .sqsh file"
            hint = "name the .sqsh file to build, on storage shared by all nodes"
            yield Problem("image.output", reason, hint, about=("container.image",))
        if code is None:
            reason = "is not set, and neither is code_dir in the cluster profile, so the image would lack the trainer"
            yield Problem("image.code", reason, "run hpcgen install-code and use its directory here")
        elif image.megatron_core and not code.endswith(".whl"):
            reason = f"applies only to a wheel, but the directory {code} contains its own Megatron-Core"
            yield Problem("image.megatron_core", reason, "remove it")
        if image.megatron_deepspeed and not image.deepspeed:
            yield Problem("image.megatron_deepspeed", "needs DeepSpeed", "set image.deepspeed to true")
        if image.need == ():
            yield Problem("image.need", "is empty", "name at least one check, such as torch, or remove it")


def _output(run: Run, config: RunConfig) -> str:
    """The path of the image to build: image.output, or container.image if it is a .sqsh file; empty if neither."""
    used = config.container.image or run.cluster.container.image or ""
    return config.image.output or (used if used.endswith(".sqsh") else "")


def _code(run: Run, config: RunConfig) -> str | None:
    return config.image.code or run.cluster.code_dir


def _topology(run: Run) -> dict[str, str]:
    """Name and content of the node type's topology file; empty if it has none."""
    path = run.node_type.topology_file
    if path is None:
        return {}
    from hpcgen.topology import nccl_xml  # an XML writer that no other stage needs

    return {PurePosixPath(path).name: nccl_xml.write(run.cluster.node_type, run.node_type)}


STAGES = (Image.of("image"),)
