"""Loading a run file: precedence, the places of mistakes, and all mistakes at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen.config.loader import load_cluster_run, load_run
from hpcgen.errors import FileErrors, HpcgenError
from tests.runs import loaded, minimal_run, refused

CHECKOUT = Path(__file__).parents[2]


def mistakes(directory: Path, text: str, overrides: tuple[str, ...] = ()) -> list[str]:
    """The mistakes of a run file, with its path shortened to run.yaml."""
    path = directory / "run.yaml"
    path.write_text(text)
    with pytest.raises(FileErrors) as error:
        load_run(path, overrides)
    return [message.replace(f"{directory}/", "") for message in error.value.messages]


def test_all_mistakes_at_once_each_with_its_place(tmp_path):
    text = """\
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
    assert mistakes(tmp_path, text, ("checkpoint.save_interval=0",)) == [
        "run.yaml:8: slurm.train.nodes = two must be a whole number",
        "run.yaml:9: slurm.train.nods = 2 is not a known key; did you mean nodes?",
        "run.yaml:13: data.datasets[0].prefx = /data/a is not a known key; did you mean prefix?",
        "run.yaml:14: data.mock = yes must be true or false; write true",
        "run.yaml:19: model.num_layers = 12.5 must be a whole number",
        "run.yaml:16: training.precision = bf61 must be bf16, fp16 or fp32",
        'run.yaml:5: secret = ["X"] is not a known key; did you mean secrets?',
        "run.yaml:1: name = \"a b\" must be 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit",
        "run.yaml:21: environment.A-B must be the name of an environment variable",
        "run.yaml:22: environment.GREETING contains the unprintable character '\\x1b'; remove it",
        'run.yaml:10: slurm.train.time = "3 days" must be a Slurm time such as 30:00 (minutes:seconds), '
        "12:00:00 or 2-00:00:00",
        "run.yaml:17: training.seed = -1 must be at least 0",
        "--set checkpoint.save_interval: checkpoint.save_interval = 0 must be at least 1",
    ]


@pytest.mark.parametrize(
    ("key", "most"), [("model.num_layers", 10000), ("data.corpus.num_output_files", 99999)]
)
def test_a_number_with_zeros_too_many_does_not_take_all_memory(tmp_path, key, most):
    corpus = {"directory": "/corpus", "source": {"directory": "/text"}}
    found = refused(tmp_path, minimal_run(data={"corpus": corpus}), [f"{key}=1000000000000"])
    assert [str(mistake) for mistake in found] == [
        f"--set {key}: {key} = 1000000000000 must be at most {most}"
    ]


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


def test_a_missing_key_is_reported_at_its_section(tmp_path):
    text = "name: a\ncluster: local\npaths:\n  run_dir: /r\nmodel:\n  num_layers: 2\n"
    assert mistakes(tmp_path, text) == [
        "run.yaml:5: model.hidden_size is missing",
        "run.yaml:5: model.num_attention_heads is missing",
        "run.yaml:5: model.seq_length is missing",
    ]


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


def test_an_unknown_preset_is_the_only_mistake(tmp_path):
    text = "name: a\ncluster: local\npreset: 175B\npaths: {run_dir: /r}\n"
    assert mistakes(tmp_path, text) == ["run.yaml:3: preset = 175B is not a known preset; did you mean 175b?"]


def test_an_unknown_preset_with_a_complete_shape(tmp_path):
    [mistake] = refused(tmp_path, minimal_run(preset="a b"))
    assert 'preset = "a b" is not a known preset; use one of 125m, ' in str(mistake)


def test_an_unknown_cluster_lists_the_known_ones(tmp_path):
    text = "name: a\ncluster: orion\npreset: tiny\npaths: {run_dir: /r}\n"
    assert mistakes(tmp_path, text) == [
        "run.yaml:2: cluster = orion is not a known cluster profile; use the path of a .yaml file, "
        "or one of azure-ndv5, local"
    ]


def test_a_path_of_a_profile_that_does_not_exist(tmp_path):
    text = "name: a\ncluster: ./clusters/orion.yaml\npreset: tiny\npaths: {run_dir: /r}\n"
    assert mistakes(tmp_path, text) == [
        "run.yaml:2: cluster = ./clusters/orion.yaml does not exist (clusters/orion.yaml); "
        "use the path of a cluster profile, or one of azure-ndv5, local"
    ]


@pytest.mark.parametrize("name", ["x" * 200, "a/" * 300 + "b", "ü"])
def test_a_cluster_that_cannot_be_found(tmp_path, name):
    [mistake] = refused(tmp_path, minimal_run(cluster=name))
    assert mistake.reason == "is not a known cluster profile"


def test_mistakes_of_the_cluster_profile_have_its_lines(tmp_path):
    (tmp_path / "site.yaml").write_text("extends: local\ngres: gpu\nscratsh: /nvme\nenvironment: {X: 1}\n")
    text = "name: a\ncluster: ./site.yaml\npreset: tiny\npaths: {run_dir: /r}\n"
    assert mistakes(tmp_path, text) == [
        "site.yaml:4: environment.X must be text (quote it)",
        "site.yaml:3: scratsh = /nvme is not a known key; did you mean scratch?",
        'site.yaml:2: gres = gpu must be "gpus-per-node", "gpu:8", "gpu:h100:8" or "none"',
    ]


def test_mistakes_of_run_file_and_cluster_come_together(tmp_path):
    (tmp_path / "site.yaml").write_text("extends: local\nnode_type: ndv6\n")
    text = "name: a b\ncluster: ./site.yaml\npreset: tiny\npaths: {run_dir: /r}\n"
    name, node_type = mistakes(tmp_path, text)
    assert name.startswith("run.yaml:1: name = ")
    assert (
        node_type
        == "site.yaml:2: node_type = ndv6 is not a known node type; use one of cpu, ndv4, ndv5, ndv5-h200"
    )


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
    [message] = mistakes(tmp_path, text)
    assert message == "run.yaml:5: environment.HF_TOKEN must be text"


def test_keys_with_unprintable_characters_do_not_reach_the_terminal(tmp_path):
    text = "name: a\ncluster: local\npreset: tiny\npaths: {run_dir: /r}\n"
    text += '"\\e[31m\\nx": 1\nenvironment: {"A\\n": b}\n'
    found = mistakes(tmp_path, text)
    assert len(found) == 2
    assert all(message.isprintable() for message in found)


@pytest.mark.parametrize("path", sorted(CHECKOUT.glob("examples/*.yaml")), ids=lambda path: path.name)
def test_examples_load(path, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    assert load_run(path).config.name
