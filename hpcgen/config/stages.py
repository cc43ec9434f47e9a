"""The stages: one row for each kind of job, in the order in which they are listed and run.

Commands, run files and plans read the rows without importing what a stage does. `hpcgen/stages` has a class for each
row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import partial

from trainer.contract.record import record

RENDEZVOUS = {
    "MASTER_ADDR": "address of the step's first node, as reported by scontrol",
    "MASTER_PORT": "10000 to 29999, from the job ID, restart count and step count; a later port if it is in use",
    "WORLD_SIZE": "number of ranks in the step",
}
"""Variables for the rendezvous of ranks, and how the script of every stage with ranks computes them."""

RENDEZVOUS_ID = {
    "TRAINER_RENDEZVOUS_ID": "random for each attempt; identifies the ranks of a job if MASTER_PORT is already in use"
}
"""Computed together with RENDEZVOUS."""

TRAINING = dict.fromkeys(("model", "training", "optimizer"), "add it, or a preset (see hpcgen presets)")
"""`StageRow.needs` of stages that read the trainer's configuration."""

RUN = "run"
"""Name of the stage that runs a program of the user."""
PREPARE = "prepare"
"""Name of the stage that makes the pairs of a corpus directly from its files."""
TRAINER_FILE = "trainer.json"
MACHINE_FILE = "machine.json"
"""The job file that names the nodes, for the prediction in reports."""


@record(kw_only=True, eq=False)
class StageRow:
    """Facts about a stage for commands, run files and plans. Its class in `hpcgen/stages` describes its job."""

    name: str
    """Name in commands, template files and logs, such as nccl-test."""
    summary: str
    """Purpose of the job, in one line that begins with a verb. The help of commands, the documentation of the stage's
    section under `slurm` and docs/stages.md have it."""
    other_names: tuple[str, ...] = ()
    """Words for this kind of job in other programs. If a user types one, the error message suggests `name`."""

    is_array: bool = False
    """The job is an array whose tasks share the work on the corpus."""
    uses_gpus: bool = False
    """The job uses all GPUs of its nodes. Unless it is a single task, its tasks are ranks with a rendezvous."""
    is_single_task: bool = False
    """The job, or each task of an array, is one process on one node."""
    one_node_by_default: bool = False
    """The job runs on one node unless the stage's own section sets `nodes`."""
    settings_of: str = ""
    """Stage whose settings apply where the stage's own section sets none, except for its time limit."""
    shares_node: bool = False
    """Other jobs may run on the job's node."""
    in_container: bool = True
    """The job runs in the container of the run, if there is one."""
    runs_own_files: bool = False
    """The job runs a program contained in its script, in place of Python. The script writes the files to a directory
    that only the job's user can write to."""
    runs_user_program: bool = False
    """The job runs a program of the user, in place of Python with hpcgen's code."""
    no_kill: bool = False
    """The job continues when one of its nodes fails."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Keys of the run file that the job needs, and what to do if one is missing. Without any, a cluster profile is
    enough."""
    by_submitit: bool = False
    """`hpcgen submit` can run the stage. All stages can be rendered."""

    has_command: bool = False
    """`hpcgen NAME` submits the job and shows its results."""

    frame: str = "base"
    """Template that the stage's template extends: base, or one that extends base."""
    time_limit: str | None = None
    """Default time limit. None requires one in the run file or the cluster profile."""

    trains: bool = False
    """The job is hpcgen's training. Its progress is counted in steps."""
    has_attempts: bool = False
    """The job requeues itself as long as it makes progress, and can check its nodes before each attempt."""
    reads_trainer_config: bool = False
    """The job reads the trainer's resolved configuration, so the rules for training are checked."""
    makes_pairs: bool = False
    """The job produces the corpus's .bin/.idx pairs."""
    uses_tokenizer: bool = False
    """The job uses the tokenizer with the trained model, so it must be the one that made the training pairs."""

    config_file: str = ""
    """Name in `Work.files` of the file that configures a task. Python gets it as --config. Empty for none."""
    config_variable: str = ""
    """Variable with the path of `config_file`, computed by the script. Empty for none."""
    own_variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the stage's script computes in addition to `config_variable`, with a description. RUN_DIR stands
    for the run directory."""
    has_stop_file: bool = False
    """The command has --stop-file: when that file appears, the job saves a checkpoint, marks the run directory as
    stopped, and ends."""

    @property
    def section(self) -> str:
        """The stage's key under `slurm`, such as nccl_test."""
        return self.name.replace("-", "_")

    @property
    def module(self) -> str:
        """The stage's module in hpcgen/stages, such as nccl_test. The stages of the corpus share one."""
        return "data" if self.is_array else self.section

    @property
    def template(self) -> str:
        """The stage's template, such as slurm/nccl-test.sbatch.j2."""
        return f"slurm/{self.name}.sbatch.j2"

    @property
    def start_command(self) -> str:
        """The command that starts the job, or writes its script."""
        if self.has_command:
            return f"hpcgen {self.name}"
        return f"hpcgen {'submit' if self.by_submitit else 'render'} {self.name}"

    @property
    def has_ranks(self) -> bool:
        """The job's tasks are ranks with a rendezvous."""
        return self.uses_gpus and not self.is_single_task

    @property
    def script_variables(self) -> Mapping[str, str]:
        """All variables that the script computes when the job runs, with a description."""
        directory = f"RUN_DIR/jobs/{'ARRAY_TASK' if self.is_array else 'JOBID'}"
        return {
            **(RENDEZVOUS | RENDEZVOUS_ID if self.has_ranks else {}),
            **({self.config_variable: f"{directory}/{self.config_file}"} if self.config_variable else {}),
            **self.own_variables,
        }


_data_stage = partial(
    StageRow,
    is_array=True,
    is_single_task=True,
    needs={"data.corpus": "set at least its directory and source"},
    by_submitit=True,
    frame="data",
    config_file="corpus.json",
    config_variable="CORPUS_JOB",
)

STAGE_ROWS: Mapping[str, StageRow] = {
    row.name: row
    for row in (
        StageRow(
            name="image",
            summary="make the container image",
            other_names=("build-image", "pull-image", "docker-build", "enroot-import"),
            is_single_task=True,
            in_container=False,
            runs_own_files=True,
            time_limit="2:00:00",
        ),
        _data_stage(
            name="download",
            summary="fetch the files of the corpus",
            other_names=("fetch", "wget"),
            shares_node=True,
            time_limit="1-00:00:00",
        ),
        _data_stage(
            name="extract",
            summary="make plain JSON Lines from compressed and Parquet files",
            other_names=("decompress", "unpack", "unzip", "gunzip", "untar"),
            time_limit="8:00:00",
        ),
        _data_stage(
            name="concat",
            summary="join the extracted files into num_output_files files",
            other_names=("concatenate",),
            time_limit="8:00:00",
        ),
        _data_stage(
            name="tokenize",
            summary="make a .bin/.idx pair from each concatenated file",
            other_names=("tokenization", "encode"),
            makes_pairs=True,
            time_limit="8:00:00",
        ),
        _data_stage(
            name=PREPARE,
            summary="make the .bin/.idx pairs directly from the files of the corpus",
            other_names=("preprocess", "preprocess-data", "preprocessing", "preparation"),
            makes_pairs=True,
            time_limit="12:00:00",
        ),
        StageRow(
            name="index-cache",
            summary="build Megatron's sample indices on CPUs before training",
            other_names=("index", "build-index", "indices"),
            is_single_task=True,
            needs=TRAINING,
            by_submitit=True,
            time_limit="4:00:00",
            reads_trainer_config=True,
            config_file=TRAINER_FILE,
            config_variable="TRAINER_CONFIG",
        ),
        StageRow(
            name="memory-test",
            summary="measure on one node whether the training fits its GPUs",
            other_names=("memory-check", "oom-test"),
            uses_gpus=True,
            is_single_task=True,
            needs=TRAINING,
            by_submitit=True,
            time_limit="30:00",
            reads_trainer_config=True,
            config_file="memory-test.config.json",
            config_variable="MEMORY_TEST_CONFIG",
        ),
        StageRow(
            name="tune",
            summary="measure layouts of the training on its nodes",
            other_names=("autotune", "auto-tune", "autoconfigurator", "trials", "tuning"),
            uses_gpus=True,
            settings_of="train",
            needs=TRAINING,
            has_command=True,
            time_limit="2:00:00",
            reads_trainer_config=True,
        ),
        StageRow(
            name="train",
            summary="train the model",
            other_names=("training", "pretrain", "pretraining", "pretrain-gpt"),
            uses_gpus=True,
            needs=TRAINING,
            by_submitit=True,
            trains=True,
            has_attempts=True,
            reads_trainer_config=True,
            config_file=TRAINER_FILE,
            config_variable="TRAINER_CONFIG",
            own_variables={"TRAINER_STOP_FILE": "RUN_DIR/jobs/JOBID/stop-RESTART"},
            has_stop_file=True,
        ),
        StageRow(
            name=RUN,
            summary="run a training program of your own",
            uses_gpus=True,
            runs_user_program=True,
            needs={"program": "set at least program.command"},
            by_submitit=True,
            has_attempts=True,
            config_file="program.sh",
        ),
        StageRow(
            name="evaluate",
            summary="evaluate checkpoints by perplexity and tasks of lm-eval",
            other_names=("eval", "evaluation", "lm-eval", "lm-harness", "perplexity", "ppl"),
            uses_gpus=True,
            needs=TRAINING,
            by_submitit=True,
            time_limit="4:00:00",
            reads_trainer_config=True,
            config_file="evaluation.json",
            config_variable="EVALUATION_CONFIG",
        ),
        StageRow(
            name="generate",
            summary="continue the prompts of a file with the newest checkpoint",
            other_names=("generation", "infer", "inference", "predict"),
            uses_gpus=True,
            one_node_by_default=True,
            needs={"generation.prompts": "name a JSON Lines file with prompts"},
            by_submitit=True,
            uses_tokenizer=True,
            time_limit="4:00:00",
        ),
        StageRow(
            name="export",
            summary="write the newest checkpoint as a Hugging Face directory",
            other_names=("to-hf", "export-hf"),
            is_single_task=True,
            needs={
                "model": TRAINING["model"],
                "export.directory": "name a new directory for the exported model",
            },
            by_submitit=True,
            uses_tokenizer=True,
            time_limit="4:00:00",
        ),
        StageRow(
            name="nccl-test",
            summary="measure the bandwidth between the GPUs of the job",
            other_names=("nccl", "all-reduce", "allreduce", "bandwidth", "bandwidth-test", "network-test"),
            uses_gpus=True,
            time_limit="30:00",
        ),
        StageRow(
            name="node-health",
            summary="check every node of the job, on the host and with its GPUs",
            other_names=("health", "health-check", "healthcheck", "node-check", "check-nodes", "burn-in"),
            uses_gpus=True,
            no_kill=True,
            time_limit="30:00",
        ),
        StageRow(
            name="tensorboard",
            summary="serve TensorBoard for the run directory until the time limit",
            other_names=("tb",),
            is_single_task=True,
            shares_node=True,
            time_limit="8:00:00",
        ),
    )
}
"""All stages by name."""

FRAMES = tuple(dict.fromkeys(row.frame for row in STAGE_ROWS.values()))
"""Templates that the stages' templates extend: base and data."""


def has_attempts(stage: str | None) -> bool:
    """True if a stage trains: hpcgen's training, or a program of the user. False for a name that no stage has."""
    row = STAGE_ROWS.get(stage or "")
    return row is not None and row.has_attempts


def stage_called(word: str) -> StageRow | None:
    """The stage with this name, here or in other programs."""
    plain = word.lower().replace("_", "-")
    return next((row for row in STAGE_ROWS.values() if plain in (row.name, *row.other_names)), None)
