"""Unknown commands, stages, options and presets: a hint names only what does what was asked, or nothing."""

import random
import re
import string

import click
import pytest

from hpcgen.cli import words
from hpcgen.cli.main import cli
from hpcgen.cli.unknown import unknown_command, unknown_option, unknown_stage
from hpcgen.config.keys import key_paths
from hpcgen.config.presets import PRESETS, unknown_preset
from hpcgen.config.run import RunConfig
from hpcgen.stages import STAGES
from hpcgen.text import did_you_mean, misspelled

ROOT = click.Context(cli, info_name="hpcgen")
GROUPS = {
    name: click.Context(command, info_name=name, parent=ROOT)
    for name in cli.list_commands(ROOT)
    if isinstance(command := cli.get_command(ROOT, name), click.Group)
}
CONTEXTS = {"": ROOT, **GROUPS}

MEANINGS = """
    metrics plot curves history                             hpcgen report
    monitor watch dashboard top stats                       hpcgen status RUN_DIR
    compare                                                 hpcgen report RUN_DIR RUN_DIR
    tail log                                                hpcgen logs RUN_DIR
    kill scancel abort down                                 hpcgen cancel RUN_DIR
    continue restart retry requeue                          hpcgen resume RUN_DIR
    launch start up                                         hpcgen submit STAGE...
    estimate check dry-run plan size                        hpcgen validate
    plan parallelism deadline autoconfig                    hpcgen layouts
    convert                                                 hpcgen checkpoint export
    export                                                  hpcgen checkpoint export
    import                                                  hpcgen checkpoint import
    chat ask infer inference                                hpcgen generate
    train pretrain training                                 hpcgen submit train
    eval evaluate perplexity lm_eval                        hpcgen submit evaluate
    preprocess preprocess_data                              hpcgen data prepare
    tokenize                                                hpcgen data tokenize
    new create quickstart wizard                            hpcgen init
    print script preview                                    hpcgen render STAGE
    image build-image                                       hpcgen render image
    health node_health                                      hpcgen render node-health
    autotune tuning                                         hpcgen tune
    nccl allreduce                                          hpcgen render nccl-test
    prune                                                   hpcgen checkpoint prune
    inspect                                                 hpcgen data inspect
    ls list                                                 list after cluster
    models                                                  hpcgen presets
    squeue srun sinfo                                       program of Slurm
    sft lora finetune                                       lora.rank trains adapters (docs/fine-tuning.md)
    qlora                                                   run TRL with bitsandbytes in the stage run
    dpo grpo rlhf reward_model                              run TRL in the stage run, as examples/trl_dpo.yaml
    distill                                                 set training.loss
    fsdp zero3                                              hpcgen layouts. For FSDP, see
    torchrun deepspeed                                      docs/program.md
    grid hpo                                                hpcgen sweep
    push upload                                             uploads nothing
    serve                                                   serves no models
    help                                                    hpcgen --help
    version                                                 hpcgen --version
    run.yaml                                                hpcgen validate -c run.yaml
    train.sh job.sbatch                                     hpcgen lint
    rendr                                                   render?
    trian                                                   if you mean train, use hpcgen submit train
    statsu                                                  did you mean status
"""
WITHOUT_MEANING = (
    *("attach", "get", "describe", "delete", "apply", "rm", "commit", "clone", "login", "benchmark", "test"),
    *("merge", "format", "fix", "debug", "release", "time", "cost", "budget", "cache", "build"),
    *(
        "brain",
        "grain",
        "drain",
        "fail",
        "mail",
        "rail",
        "trailer",
        "unit",
        "date",
        "link",
        "line",
        "mint",
        "hint",
    ),
    *(
        "gender",
        "estate",
        "climate",
        "animate",
        "coffee",
        "banana",
        "window",
        "garden",
        "river",
        "music",
        "letter",
    ),
    *(
        "stomach",
        "planet",
        "plant",
        "candle",
        "sunset",
        "winter",
        "closet",
        "reset",
        "private",
        "primate",
        "vendor",
    ),
    *(
        "terraform",
        "helm",
        "poetry",
        "vagrant",
        "ansible",
        "conda",
        "spack",
        "axolotl",
        "hydra",
        "mpirun",
        "pytest",
    ),
    *("2", "?", "NCCL_DEBUG", "runs/none", "a=b", "héllo", "model.json"),
)


def of_table(table: str) -> list[tuple[str, str]]:
    rows = [re.split(r"\s{2,}", row.strip()) for row in table.strip().splitlines()]
    return [(word, answer) for listed, answer in rows for word in listed.split()]


def edited(name: str, rng: random.Random) -> str:
    """The name with one typing mistake in a letter."""
    places = [i for i in range(1, len(name)) if name[i - 1 : i + 1].isalpha()]
    place = rng.choice(places)
    before, letter, after = name[:place], name[place], name[place + 1 :]
    exchanged = after[:1] + letter + after[1:] if after[:1].isalpha() else letter + after
    other = rng.choice(string.ascii_lowercase)
    return before + rng.choice((after, letter + letter + after, other + after, exchanged))


@pytest.mark.parametrize(("word", "answer"), of_table(MEANINGS))
def test_a_word_of_another_program_is_answered_with_what_does_the_same(word, answer):
    assert answer in unknown_command(ROOT, word)


@pytest.mark.parametrize("word", WITHOUT_MEANING)
def test_a_word_with_no_meaning_here_gets_the_list(word):
    assert unknown_command(ROOT, word).startswith("commands are init, ")


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_answers_the_words_of_its_own_table(group):
    for word in words.GROUPS[group]:
        assert (
            f"hpcgen {group}" in (hint := unknown_command(GROUPS[group], word))
            or "hpcgen" not in hint
            or ("submit" in hint or "hpcgen resume" in hint)
        )


@pytest.mark.parametrize(
    ("group", "word", "answer"),
    [
        ("data", "preprocess", "use hpcgen data prepare"),
        ("data", "train", "use hpcgen submit train"),
        ("data", "report", "use hpcgen report"),
        ("checkpoint", "verify", "use hpcgen checkpoint inspect --verify PATH"),
        ("checkpoint", "rm", "commands are list, inspect"),
        ("checkpoint", "rollback", "to resume from an older checkpoint, move the newer ones away"),
        ("checkpoint", "evaluate", "use hpcgen submit evaluate"),
        *((group, "download", "commands are ") for group in ("checkpoint", "cluster", "templates")),
        *((group, "unpack", "commands are ") for group in ("checkpoint", "topology")),
        ("topology", "export", "use hpcgen topology xml NAME"),
        ("templates", "export", "commands are "),
        ("templates", "generate", "use hpcgen templates override STAGE"),
        ("cluster", "shwo", "did you mean show?"),
        ("templates", "lint", "use hpcgen templates check"),
        ("topology", "nothing", "commands are "),
    ],
)
def test_a_word_in_place_of_the_command_of_a_group(group, word, answer):
    assert unknown_command(GROUPS[group], word).startswith(answer)


def test_hints_name_existing_commands():
    texts = [*words.TOP.values(), *(text for table in words.GROUPS.values() for text in table.values())]
    for found in re.findall(r"hpcgen ([a-z-]+)(?: ([a-z-]+))?", "; ".join(texts)):
        command = cli.get_command(ROOT, found[0])
        if command is None:
            assert found[0] in ("has", "serves", "uploads", "in", "--help", "--version"), found
        elif isinstance(command, click.Group) and found[1]:
            assert found[1] in (*command.list_commands(ROOT), "for", "after"), found
    for stage in re.findall(r"hpcgen (?:submit|render) ([a-z][a-z-]+)", "; ".join(texts)):
        assert stage in STAGES or stage in ("for",)


def test_no_word_is_a_command():
    assert not set(words.TOP) & set(cli.list_commands(ROOT))
    for group, table in words.GROUPS.items():
        assert not set(table) & set(GROUPS[group].command.list_commands(GROUPS[group]))


def test_no_two_stages_share_a_word():
    used = [word for stage in STAGES.values() for word in (stage.name, *stage.other_names)]
    assert len(used) == len(set(used))


@pytest.mark.parametrize("seed", range(2))
def test_a_misspelled_name_is_found_again(seed):
    """Short names are left out: one letter makes another word of them."""
    rng = random.Random(seed)
    kinds = {
        "command": cli.list_commands(ROOT),
        "stage": list(STAGES),
        "preset": list(PRESETS),
        "key": sorted({key.rpartition(".")[2] for key in key_paths(RunConfig)}),
    }
    for kind, names in kinds.items():
        for name in (name for name in names if sum(map(str.isalpha, name)) >= 5):
            typed = edited(name, rng)
            if typed not in names:
                assert name in misspelled(typed, names), (kind, typed)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *(
            (size, "use one of 125m")
            for size in ("7b", "1b", "8b", "70b", "1.5b", "2.7b", "12b", "34b", "126m")
        ),
        *(
            (name, "use one of 125m")
            for name in ("llama-7b", "llama2-7b", "llama3.1-8b", "llama3-80b", "mistral-7b")
        ),
        *(
            (name, "use one of 125m")
            for name in ("gpt2", "mixtral-8x22b", "deepseek-v2", "qwen2-7b", "nano", "toy")
        ),
        *((name, "did you mean llama3-8b?") for name in ("llama-3-8b", "llama3_8B", "lama3-8b", "llama3-8")),
        ("13B", "did you mean 13b?"),
        ("1,3b", "did you mean 1.3b?"),
        ("345", "did you mean 345m?"),
        ("gpt3-175b", "did you mean 175b?"),
        ("mixtral8x7b", "did you mean mixtral-8x7b?"),
        ("llama", "names that begin with llama: llama3-405b, llama3-70b, llama3-8b"),
        ("deepseek", "names that begin with deepseek: deepseek-v3"),
    ],
)
def test_a_preset_of_another_size_is_no_misspelling(name, hint):
    assert unknown_preset(name).startswith(hint)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pretrain", "use train"),
        ("eval", "use evaluate"),
        ("preprocess_data", "use prepare"),
        ("nccl", "use hpcgen render nccl-test"),
        ("tarin", "did you mean train?"),
        ("brain", "stages are "),
        ("convert", "use hpcgen checkpoint export or import"),
        ("finetune", "use hpcgen init --from-hf"),
        ("dpo", "hpcgen's trainer does not train on preferences or rewards; run TRL in the stage run"),
        ("serve", "hpcgen serves no models"),
        ("launch", "stages are "),
        ("validate", "stages are "),
        ("run.yml", "to name the run file, use -c run.yml"),
    ],
)
def test_a_word_in_place_of_a_stage(name, hint):
    assert unknown_stage(name, [stage for stage in STAGES if STAGES[stage].by_submitit]).startswith(hint)


@pytest.mark.parametrize(
    ("command", "option", "hint"),
    [
        ("submit", "--nodes", "use --set slurm.train.nodes=VALUE"),
        ("submit", "-N", "use --set slurm.train.nodes=VALUE"),
        ("submit", "--gpus", "use --set slurm.train.nodes=VALUE, the number of nodes with all their GPUs"),
        ("submit", "--lr", "use --set optimizer.lr=VALUE"),
        ("submit", "--file", "use --config"),
        ("submit", "--test-only", "use --dry-run"),
        ("submit", "--local", "use --launcher local"),
        ("submit", "--resume", "remove it, because a run always resumes"),
        ("submit", "--wait", "hpcgen submit --help lists the options"),
        ("submit", "--luancher", "did you mean --launcher?"),
        ("render", "--out", "use --output"),
        ("submit", "--dependency", "use --set 'slurm.train.extra_directives=[--dependency=VALUE]'"),
        ("submit", "-w", "use --set 'slurm.train.extra_directives=[--nodelist=VALUE]'"),
        ("render", "--hold", "use --set 'slurm.train.extra_directives=[--hold]'"),
        ("validate", "--hint", "hpcgen validate --help lists the options"),
        ("submit", "--array", "hpcgen submit --help lists the options"),
        ("submit", "--job-name", "use --set name=VALUE"),
        ("validate", "--cluster", "use --set cluster=VALUE"),
        ("validate", "--container", "hpcgen validate --help lists the options"),
        ("init", "--nodes", "in the run file, set slurm.train.nodes"),
        ("init", "--output", "hpcgen init --help lists the options"),
        ("init", "--yes", "use --force"),
        ("init", "--short", "hpcgen init --help lists the options"),
        ("generate", "--max-tokens", "use --max-new-tokens"),
        ("report", "--open", "hpcgen report --help lists the options"),
        ("validate", "--pedantic", "hpcgen validate --help lists the options"),
    ],
)
def test_an_unknown_option(command, option, hint):
    context = click.Context(cli.get_command(ROOT, command), info_name=command, parent=ROOT)
    assert unknown_option(option, context).startswith(f"no such option {option}; {hint}")


OPPOSITES = (
    "min max",
    "first last",
    "gpu cpu",
    "gpus cpus",
    "node core",
    "start end",
    "iters epochs",
    "init seed",
)


def test_a_key_with_another_word_is_no_misspelling():
    names = sorted({key.rpartition(".")[2] for key in key_paths(RunConfig)})
    changed = [
        (name, re.sub(rf"(?<![a-z]){a}(?![a-z])", b, name))
        for pair in OPPOSITES
        for a, b in (pair.split(), reversed(pair.split()))
        for name in names
    ]
    typed = [(name, other) for name, other in changed if other not in names]
    assert ("max_new_tokens", "min_new_tokens") in typed
    assert [other for name, other in typed if name in misspelled(other, names)] == []


def test_a_long_list_of_the_same_beginning_is_no_hint():
    assert did_you_mean("model", [f"model_{letter}" for letter in "abcde"]) == ""
