"""Representative runs, for which templates are checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from hpcgen.config.cluster import ClusterConfig, limits_of, within_limit
from hpcgen.config.container import Runtime
from hpcgen.config.loader import Run, load_cluster_run
from hpcgen.config.program import ProgramConfig
from hpcgen.config.run import RunConfig
from hpcgen.config.starter import TIME
from hpcgen.planning.runtimes import RUNTIMES
from hpcgen.run_plan.plan import Plan, plan
from hpcgen.stages import STAGES
from hpcgen.stages.train import TRAIN

RUN_DIR = "/runs/representative"
IMAGE = "/images/representative"
OVERRIDES = (
    "secrets=[REPRESENTATIVE_TOKEN]",
    "environment.REPRESENTATIVE=two words",
    "preset=tiny",
    "data.corpus={directory: /data/corpus, source: {directory: /data/text}, num_output_files: 16}",
    "evaluation.data=[{name: text, prefix: /data/text}]",
    "generation.prompts=/data/prompts.jsonl",
    "export.directory=/models/exported",
    f"image.output={IMAGE}.sqsh",
    "image.code=/code/hpcgen",
    "training.micro_batch_size=1",
    # divisible by 1 to 10, 12, 14, 15 and 16 ranks
    "training.global_batch_size=5040",
)
"""Overrides for a small run in which every stage has work."""


@dataclass(frozen=True, kw_only=True)
class Representative:
    """A planned run of a cluster."""

    cluster: str
    runtime: Runtime
    preflight: bool
    """True if training checks its nodes first and has a spare node."""
    plan: Plan

    @property
    def label(self) -> str:
        """The cluster and runtime, as shown with a finding."""
        return f"{self.cluster}, {self.runtime}{', preflight' if self.preflight else ''}"


def representatives(cluster: str) -> Iterator[Representative]:
    """Plans of every stage on a cluster, for each runtime it can use. Training is also planned with preflight.

    Raises:
        ConfigErrors, HpcgenError: the cluster profile is invalid, or too small for the run.
    """
    run = load_cluster_run(cluster, RUN_DIR, OVERRIDES)
    # what a run file has to set, such as an account, changes no template
    profile = dataclasses.replace(run.cluster, required_settings=())
    for runtime in runtimes(profile):
        for preflight in (False, True):
            variant = dataclasses.replace(run, cluster=profile, config=_config(run, runtime, preflight))
            stages = (TRAIN.name,) if preflight else tuple(STAGES)
            planned = plan(variant, stages, exists=lambda path: True)
            yield Representative(cluster=cluster, runtime=runtime, preflight=preflight, plan=planned)


def runtimes(profile: ClusterConfig) -> tuple[Runtime, ...]:
    """The runtime of the profile, `none`, and the runtimes that can start the profile's image, if it names one."""
    own: Runtime = profile.container.runtime or "none"
    image = profile.container.image
    with_image: tuple[Runtime, ...] = ("pyxis", "enroot") if image and RUNTIMES["pyxis"].starts(image) else ()
    return tuple(dict.fromkeys((own, "none", *with_image)))


def _config(run: Run, runtime: Runtime, preflight: bool) -> RunConfig:
    config, profile = run.config, run.cluster
    image = profile.container.image or ""
    kind = RUNTIMES.get(runtime)
    stand_in = None if kind is None or kind.starts(image) else f"{IMAGE}{kind.suffix}"
    spare_nodes = 1 if preflight and _has_room(profile) else 0
    times = {
        stage.section: dataclasses.replace(
            config.slurm.of(stage), time=within_limit(TIME, profile.slurm.merged(stage), profile)
        )
        for stage in STAGES.values()
        if stage.time_limit is None
    }
    return dataclasses.replace(
        config,
        container=dataclasses.replace(config.container, runtime=runtime, image=stand_in),
        slurm=dataclasses.replace(config.slurm, **times),
        program=ProgramConfig(command=("true",)),
        preflight=dataclasses.replace(config.preflight, node_health=preflight, spare_nodes=spare_nodes),
    )


def _has_room(profile: ClusterConfig) -> bool:
    """True if training may use two nodes."""
    limits = limits_of(profile.slurm.merged(TRAIN), profile)
    return all(each.max_nodes is None or each.max_nodes > 1 for _, each in limits)
