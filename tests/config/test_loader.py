"""Loading a run file: precedence, the places of mistakes, and all mistakes at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpcgen.config.loader import load_cluster_run, load_run, with_values
from hpcgen.errors import FileErrors, HpcgenError, Problem
from tests.runs import loaded, minimal_run, refused

CHECKOUT = Path(__file__).parents[2]


def mistakes(directory: Path, run: str, site: str = "", overrides: tuple[str, ...] = ()) -> list[Problem]:
    """The mistakes in the texts of a run file and a cluster profile. Their paths are short: run.yaml and site.yaml."""
    path = directory / "run.yaml"
    path.write_text(run)
    (directory / "site.yaml").write_text(site)
    with pytest.raises(FileErrors) as error:
        load_run(path, overrides)
    here = f"{directory}/"
    return [
        dataclasses.replace(
            mistake, where=mistake.where.replace(here, ""), reason=mistake.reason.replace(here, "")
        )
        for mistake in error.value.mistakes
    ]


MANY = """\
name: a b
cluster: local
preset: 125m
paths: {run_dir: /runs/a}
secret: [X]
slurm:
  train:
    nodes: two
    nods: 2
    time: 3 days
data:
  datasets:
  - prefx: /data/a
  mock: "yes"
training:
  precision: bf61
  seed: -1
model:
  num_layers: 12.5
environment:
  A-B: x
  GREETING: "\\e[31m"
"""
TINY = "name: a\ncluster: ./site.yaml\npreset: tiny\npaths: {run_dir: /r}\n"
LARGE = TINY + "data: {corpus: {directory: /corpus, source: {directory: /text}}}\n"

REFUSED = {
    "all mistakes at once": (
        {"run": MANY, "overrides": ("checkpoint.save_interval=0",)},
        [
            ("run.yaml:8", "slurm.train.nodes"),
            ("run.yaml:9", "slurm.train.nods"),
            ("run.yaml:13", "data.datasets[0].prefx"),
            ("run.yaml:14", "data.mock"),
            ("run.yaml:19", "model.num_layers"),
            ("run.yaml:16", "training.precision"),
            ("run.yaml:5", "secret"),
            ("run.yaml:1", "name"),
            ("run.yaml:21", "environment.A-B"),
            ("run.yaml:22", "environment.GREETING"),
            ("run.yaml:10", "slurm.train.time"),
            ("run.yaml:17", "training.seed"),
            ("--set checkpoint.save_interval", "checkpoint.save_interval"),
        ],
    ),
    "zeros too many in a number of layers": (
        {"run": LARGE, "site": "extends: local\n", "overrides": ("model.num_layers=1000000000000",)},
        [("--set model.num_layers", "model.num_layers")],
    ),
    "zeros too many in a number of files": (
        {
            "run": LARGE,
            "site": "extends: local\n",
            "overrides": ("data.corpus.num_output_files=1000000000000",),
        },
        [("--set data.corpus.num_output_files", "data.corpus.num_output_files")],
    ),
    "missing keys": (
        {"run": "name: a\ncluster: local\npaths:\n  run_dir: /r\nmodel:\n  num_layers: 2\n"},
        [("run.yaml:5", f"model.{key}") for key in ("hidden_size", "num_attention_heads", "seq_length")],
    ),
    "missing keys of a missing section": (
        {"run": "preset: tiny\ncluster: local\nnodes: 4\n"},
        [
            ("run.yaml", "name"),
            ("run.yaml", "paths.run_dir"),
            ("run.yaml:3", "nodes"),
        ],
    ),
    "an unknown preset": (
        {"run": "name: a\ncluster: local\npreset: 175B\npaths: {run_dir: /r}\n"},
        [("run.yaml:3", "preset")],
    ),
    "an unknown cluster": (
        {"run": "name: a\ncluster: orion\npreset: tiny\npaths: {run_dir: /r}\n"},
        [("run.yaml:2", "cluster")],
    ),
    "a profile that does not exist": (
        {"run": "name: a\ncluster: ./clusters/orion.yaml\npreset: tiny\npaths: {run_dir: /r}\n"},
        [("run.yaml:2", "cluster")],
    ),
    "mistakes of the profile": (
        {"run": TINY, "site": "extends: local\ngres: gpu\nscratsh: /nvme\nenvironment: {X: 1}\n"},
        [("site.yaml:4", "environment.X"), ("site.yaml:3", "scratsh"), ("site.yaml:2", "gres")],
    ),
    "mistakes of run file and profile": (
        {"run": TINY.replace("name: a", "name: a b"), "site": "extends: local\nnode_type: ndv6\n"},
        [("run.yaml:1", "name"), ("site.yaml:2", "node_type")],
    ),
    "a secret as a list": (  # its value is not printed
        {
            "run": TINY + "environment: {HF_TOKEN: [hunter2]}\n",
            "site": "extends: local\n",
        },
        [("run.yaml:5", "environment.HF_TOKEN")],
    ),
}
"""Texts of a run file and a profile, and the place and path of each mistake in them."""


@pytest.mark.parametrize(("files", "places"), REFUSED.values(), ids=REFUSED)
def test_all_mistakes_are_reported_at_once_each_with_its_place(tmp_path, files, places):
    assert [(mistake.where, mistake.path) for mistake in mistakes(tmp_path, **files)] == places


@pytest.mark.parametrize(
    ("heading", "hint"),
    [
        ("# training:  # the recipe", "uncomment training: in line 9"),
        ("# optimizer:", "use training.train_iters"),
        ("  # shuffled", "use training.train_iters"),
    ],
)
def test_a_key_below_a_heading_that_is_still_commented_out(tmp_path, heading, hint):
    """As in a file of `hpcgen init`, where the key would be in the section above."""
    lines = [
        *TINY.splitlines(),
        "# training:",
        "  # seed: 1",
        "data:",
        "  mock: true",
        heading,
        "  # seed: 1234",
        "",
        "  train_iters: 500",
    ]
    [mistake] = mistakes(tmp_path, "\n".join(lines), "extends: local\n")
    assert (mistake.where, mistake.path, mistake.hint) == ("run.yaml:12", "data.train_iters", hint)


def test_a_text_in_place_of_a_section_is_shown_as_one(tmp_path):
    data = {
        "datasets": ["/corpora/a", "/corpora/b"],
        "corpus": {"directory": "d", "source": {"url": "http://h/?sig=x"}},
    }
    hints = [str(mistake).partition(" must be ")[2] for mistake in refused(tmp_path, minimal_run(data=data))]
    assert hints == [
        "a mapping of keys to values; write {prefix: /corpora/a}",
        "a mapping of keys to values; write {prefix: /corpora/b}",
        "a mapping of keys to values",  # a secret is not shown
    ]


@pytest.mark.parametrize(
    ("key", "text", "hint"),
    [
        ("program.command", "torchrun t.py --name 'a b'", 'write ["torchrun", "t.py", "--name", "a b"]'),
        ("program.command", "python 'a", "write its words as a list, such as [python, train.py]"),
        ("program", "python t.py", 'write {command: ["python", "t.py"]}'),
        ("secrets", "HF_TOKEN", 'write ["HF_TOKEN"]'),
        ("container.mounts", "/data", "write [{source: /data}]"),
        ("training.recompute_modules", "core_attn", 'write ["core_attn"]'),
        ("logging.profile_ranks", "all", ""),
    ],
)
def test_a_text_in_place_of_a_list_is_shown_as_one(tmp_path, key, text, hint):
    values = minimal_run()
    section, _, name = key.partition(".")
    values[section] = {**values.get(section, {}), name: text} if name else text
    if section == "program":
        values = {name: values[name] for name in ("name", "cluster", "paths", "program")}
    [mistake] = refused(tmp_path, values)
    assert mistake.hint == hint


def test_a_value_of_the_preset_that_an_override_breaks(tmp_path):
    run = loaded(tmp_path, {**minimal_run(), "preset": "13b"})
    assert run.document.origin("parallelism.tensor_model_parallel_size") == "preset 13b"
    assert run.config.parallelism.tensor_model_parallel_size == 2
    assert run.config.model.num_layers == 2  # the file's, over the preset's


def test_the_order_of_precedence(tmp_path):
    values = {**minimal_run(), "preset": "125m", "training": {"global_batch_size": 8}}
    run = loaded(
        tmp_path, values, ["training.train_iters=7", "training.train_iters=8", "logging.tensorboard=false"]
    )
    assert run.config.training.micro_batch_size == 4  # the preset's
    assert run.config.training.global_batch_size == 8  # the file's
    assert run.config.training.train_iters == 8  # the last override's
    assert run.config.logging.tensorboard is False
    assert run.config.training.seed == 1234  # the default
    assert run.document.origin("training.seed") is None


def test_an_unknown_preset_with_a_complete_shape(tmp_path):
    [mistake] = refused(tmp_path, minimal_run(preset="a b"))
    assert 'preset = "a b" is not a known preset; use one of 125m, ' in str(mistake)


@pytest.mark.parametrize("name", ["x" * 200, "a/" * 300 + "b", "ü"])
def test_a_cluster_that_cannot_be_found(tmp_path, name):
    [mistake] = refused(tmp_path, minimal_run(cluster=name))
    assert mistake.reason == "is not a known cluster profile"


def test_options_are_reported_as_typed(tmp_path):
    with pytest.raises(FileErrors) as error:
        load_cluster_run("local", "a b")
    [mistake] = error.value.mistakes
    assert str(mistake).startswith('--run-dir "a b" must be a path of letters')


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("environment.X=1", "1"),
        ("environment.X=true", "true"),
        ("environment.X=1e3", "1e3"),
        ("environment.X=null", "null"),
        ("environment.X=", ""),
        ("environment.X='1'", "1"),
        ("environment.X=a b", "a b"),
    ],
)
def test_a_text_on_the_command_line_needs_no_quotes(tmp_path, assignment, value):
    assert loaded(tmp_path, minimal_run(), [assignment]).config.environment == {"X": value}


def test_override_values_of_other_types(tmp_path):
    overrides = ("name=2024", "data.mock=true", "container.torch_version=2.10", "checkpoint.load=null")
    run = loaded(tmp_path, minimal_run(), overrides)
    assert (run.config.name, run.config.data.mock) == ("2024", True)
    assert (run.config.container.torch_version, run.config.checkpoint.load) == ("2.10", None)
    for wrong in ("data.mock='yes'", "training.seed='1'", "environment.X=[1]", "environment={X: 1}"):
        assert len(refused(tmp_path, minimal_run(), [wrong])) == 1, wrong


def test_options_that_cannot_be_read_are_reported_with_all_other_mistakes(tmp_path):
    overrides = ["training.seed", "data.mock=[", "training.train_iters=ten"]
    found = refused(tmp_path, minimal_run(name="a b"), overrides)
    places = [
        "--set training.seed",
        "--set data.mock=[",
        "--set training.train_iters",
        f"{tmp_path}/run.yaml",
    ]
    assert [str(mistake).partition(":")[0] for mistake in found] == places


def test_a_profile_that_is_not_yaml(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [\n")
    [mistake] = refused(tmp_path, minimal_run(cluster="./bad.yaml"))
    assert (mistake.where, mistake.reason[:14]) == (f"{tmp_path}/bad.yaml:2", "not valid YAML")


def test_a_run_file_that_is_missing(tmp_path):
    with pytest.raises(HpcgenError, match=r"nothing\.yaml: no such file"):
        load_run(tmp_path / "nothing.yaml")


def test_secrets_given_as_environment_are_not_printed(tmp_path):
    text = "name: a\ncluster: local\npreset: tiny\npaths: {run_dir: /r}\nenvironment: {HF_TOKEN: [hunter2]}\n"
    [mistake] = mistakes(tmp_path, text)
    assert "hunter2" not in str(mistake)


def test_keys_with_unprintable_characters_do_not_reach_the_terminal(tmp_path):
    text = "name: a\ncluster: local\npreset: tiny\npaths: {run_dir: /r}\n"
    text += '"\\e[31m\\nx": 1\nenvironment: {"A\\n": b}\n'
    found = mistakes(tmp_path, text)
    assert len(found) == 2
    assert all(str(mistake).isprintable() for mistake in found)


@pytest.mark.parametrize("path", sorted(CHECKOUT.glob("examples/*.yaml")), ids=lambda path: path.name)
def test_examples_load(path, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    assert load_run(path).config.name


def test_values_that_are_set_later_act_like_set(tmp_path: Path) -> None:
    values = minimal_run()
    run = loaded(tmp_path, values)
    later = with_values(run, {"slurm.train.nodes": 4, "training.micro_batch_size": 2}, "--nodes")
    at_once = loaded(tmp_path, values, ["slurm.train.nodes=4", "training.micro_batch_size=2"])
    assert later.config == at_once.config
    assert later.document.values == at_once.document.values
    assert later.document.origin("slurm.train.nodes") == "--nodes"
    with pytest.raises(FileErrors, match="--nodes 0 must be at least 1"):
        with_values(run, {"slurm.train.nodes": 0}, "--nodes")
