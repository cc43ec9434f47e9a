"""Site directories, good ones and bad ones, as `hpcgen templates check` judges them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hpcgen.config.stages import STAGES
from hpcgen.errors import HpcgenError
from hpcgen.rendering.contract import RULES
from hpcgen.rendering.findings import Finding
from hpcgen.rendering.site import OWN_RULES, ReadScripts, Report, SiteFinding, check_site
from hpcgen.shell_programs import read_scripts
from tests.rendering.scripts import write_templates
from tests.runs import write_yaml

TRAIN = '{% extends "hpcgen/slurm/train.sbatch.j2" %}\n'
BASE = '{% extends "hpcgen/slurm/base.sbatch.j2" %}\n'
SUPER = "{{ super() }}"
SCRIPTS = len(STAGES) + 1
"""Of one cluster and runtime: every stage, and training with its nodes checked."""

GOOD = {
    "slurm/base.sbatch.j2": BASE
    + """
{% block environment %}
{{ super() }}
export SITE_CACHE=/nvme/cache
{% endblock %}

{% block site %}
site_prologue() {
    source /etc/profile.d/modules.sh
    module load cuda/12.8
    say "on $(hostname)"
    task_environment+=("SITE_CACHE=$SITE_CACHE")
}

site_epilogue() {
    ((rc == 0)) || cp -- "$run_dir/$stage-$SLURM_JOB_ID.log" /shared/failed/ || say "the log was not copied"
}
{% endblock %}
""",
    "slurm/train.sbatch.j2": TRAIN
    + """
{% block directives %}
{{ super() }}
#SBATCH --mail-type=FAIL
#SBATCH --comment={{ run_name | directive }}
{% endblock %}

{% block settings %}
{{ super() }}
step+=(--network=sharp)
archive={{ run_dir }}/archive
{% endblock %}

{% block site %}
{{ super() }}
launch() { run_step srun "${step[@]}" "${container[@]}" env "${task_environment[@]}" numactl --localalloc "$@"; }
{% endblock %}
""",
}


def nothing(scripts: Sequence[str]) -> list[list[Finding]]:
    """Instead of bash and shellcheck, which take most of the time."""
    return [[] for _ in scripts]


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    """A profile without GPUs and with containers: three runtimes, few scripts."""
    values = {
        "extends": "local",
        "container": {"runtime": "pyxis", "image": "/images/site.sqsh"},
        "partitions": {"short": {"max_time": "2:00:00", "max_nodes": 1}},
        "slurm": {"partition": "short", "time": "1:00:00"},
    }
    return str(write_yaml(tmp_path / "site-cluster.yaml", values))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    directory = tmp_path / "site"
    directory.mkdir()
    return directory


def reading(part: str) -> ReadScripts:
    """bash and shellcheck for the scripts that hold a text; each takes them half a second."""

    def read(scripts: Sequence[str]) -> list[list[Finding]]:
        return [read_scripts([script])[0] if part in script else [] for script in scripts]

    return read


def checked(site: Path, cluster: str, templates: Mapping[str, str]) -> Report:
    return check_site([write_templates(site, templates)], [cluster], nothing, named=True)


def only(report: Report) -> SiteFinding:
    assert len(report.findings) == 1, [(one.where, one.rule.name, one.what) for one in report.findings]
    return report.findings[0]


def test_the_shipped_templates_hold_to_the_contract(cluster: str) -> None:
    report = check_site([], ["azure-ndv5", "local", cluster], nothing, named=True)
    assert report.findings == ()
    # six stages, and training with preflight, for the runtimes of each
    assert report.num_scripts == SCRIPTS * (3 + 1 + 3)


def test_a_good_site(site: Path, cluster: str) -> None:
    assert checked(site, cluster, GOOD).findings == ()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_bash_and_shellcheck_have_nothing_against_a_good_site(site: Path) -> None:
    write_templates(site, GOOD)
    assert check_site([site], ["local"], reading("numactl"), named=True).findings == ()


def one_block(template: str, block: str, *lines: str) -> dict[str, str]:
    """A site that replaces one block; its first line is the file's third."""
    text = [f'{{% extends "hpcgen/slurm/{template}.sbatch.j2" %}}', f"{{% block {block} %}}", *lines]
    return {f"slurm/{template}.sbatch.j2": "\n".join([*text, "{% endblock %}", ""])}


BAD = {
    "a directive after a command": (
        one_block("train", "environment", SUPER, "#SBATCH --mail-type=END"),
        ("directive-order", 4),
    ),
    "another directive": (
        one_block("train", "directives", SUPER, "#SBATCH --no-requeue=x", "#SBATCH --requeue=x"),
        ("directive-lost", 5),
    ),
    "no settings": (one_block("train", "settings", "run_dir=/elsewhere"), ("setting-lost", 2)),
    "a misspelled block": (one_block("train", "enviroment", "true"), ("template", 2)),
    "a block of earlier versions": (one_block("train", "prologue", "module load x"), ("template", 2)),
    "a mistake of Jinja": (one_block("train", "site", "{% if device == %}"), ("template", 3)),
    "a value in shell code": (one_block("train", "site", "cd {{ run_dir }}"), ("template", 3)),
    "quotes around a value": (one_block("train", "settings", 'x="{{ run_dir }}"'), ("template", 3)),
    "no such variable": (one_block("base", "environment", "export X={{ run_directory }}"), ("template", 3)),
}


@pytest.mark.parametrize(("templates", "expected"), BAD.values(), ids=BAD)
def test_a_bad_site_is_told_the_rule_the_file_and_the_line(
    site: Path, cluster: str, templates: dict[str, str], expected: tuple[str, int]
) -> None:
    rule, line = expected
    finding = only(checked(site, "local", templates))
    assert (finding.rule.name, finding.where) == (rule, f"{site / next(iter(templates))}:{line}")
    assert finding.rule.why
    assert finding.rule.fix


def test_what_many_scripts_share_is_said_once_with_all_of_them(site: Path, cluster: str) -> None:
    templates = one_block("base", "environment", SUPER, "#SBATCH --mail-type=END")
    finding = only(checked(site, cluster, templates))
    assert len(finding.seen) == SCRIPTS * 3
    assert "train (" in " ".join(finding.seen)


def test_what_follows_from_a_lost_block_is_not_said_as_well(site: Path) -> None:
    """shellcheck misses run_dir and more in lines of ours; of the site's own lines it may speak."""
    templates = one_block("train", "settings", "run_dir=/elsewhere")
    copies = "site_epilogue() { cp $TRAINER_CONFIG /shared/kept; }"
    write_templates(site, {**templates, **one_block("base", "site", copies)})
    report = check_site([site], ["local"], reading("/shared/kept"), named=True)
    assert {finding.rule.name for finding in report.findings} >= {"setting-lost", "SC2086"}
    assert all(finding.file.startswith(f"{site}/") for finding in report.findings)


def test_many_lost_variables_are_one_finding(site: Path, cluster: str) -> None:
    finding = only(checked(site, cluster, one_block("train", "environment", "export SITE=1")))
    assert finding.rule.name == "variable-lost"
    assert set(finding.names) > {
        "PYTHONNOUSERSITE",
        "PYTHONUNBUFFERED",
        "OMP_NUM_THREADS",
        "NVIDIA_VISIBLE_DEVICES",
    }
    assert finding.said.startswith("not exported: ")
    assert finding.said.endswith(f" and {len(finding.names) - 4} more")


def test_a_template_of_its_own_lacks_the_settings(site: Path) -> None:
    templates = {"slurm/tensorboard.sbatch.j2": "#!/bin/bash\n#SBATCH --nodes=1\nsleep 60\n"}
    found = checked(site, "local", templates).findings
    lost = next(finding for finding in found if finding.rule.name == "setting-lost")
    assert lost.where == f"{site}/slurm/tensorboard.sbatch.j2:1"
    assert all(seen.startswith("tensorboard (") for finding in found for seen in finding.seen)


def test_a_missing_parent_is_named(site: Path) -> None:
    templates = {"slurm/train.sbatch.j2": '{% extends "hpcgen/slurm/trian.sbatch.j2" %}\n'}
    finding = only(checked(site, "local", templates))
    assert "there is no template 'hpcgen/slurm/trian.sbatch.j2'" in finding.what
    assert {seen.split()[0] for seen in finding.seen} == {"train"}


def test_a_file_that_is_not_used_is_a_finding(site: Path) -> None:
    finding = only(checked(site, "local", {"slurm/trian.sbatch.j2": TRAIN}))
    assert (finding.rule.name, finding.where) == ("unused-file", f"{site}/slurm/trian.sbatch.j2")
    assert f"did you mean {site}/slurm/train.sbatch.j2?" in finding.what


def test_a_file_that_everybody_may_write_to_is_a_finding(site: Path) -> None:
    write_templates(site, GOOD)
    (site / "slurm/train.sbatch.j2").chmod(0o666)
    finding = only(checked(site, "local", {}))
    assert finding.where == f"{site}/slurm/train.sbatch.j2"
    assert "everybody can write to it" in finding.what


def test_a_directory_that_everybody_may_write_to_is_refused(site: Path) -> None:
    site.chmod(0o777)
    with pytest.raises(HpcgenError, match="everybody can write to it"):
        check_site([site], ["local"], nothing)


def test_a_mistake_of_bash_is_found_with_its_template(site: Path) -> None:
    write_templates(site, one_block("train", "site", "if [[ -e /shared ]]; then", "    say there"))
    report = check_site([site], ["local"], reading("if [[ -e /shared ]]"), named=True)
    assert {finding.rule.name for finding in report.findings} == {"syntax"}


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_a_finding_of_shellcheck_has_the_template_line(site: Path) -> None:
    write_templates(
        site, one_block("train", "site", "site_epilogue() { cp -- $TRAINER_CONFIG /shared/kept/; }")
    )
    finding = only(check_site([site], ["local"], reading("cp -- $TRAINER_CONFIG"), named=True))
    assert (finding.rule.name, finding.where) == ("SC2086", f"{site}/slurm/train.sbatch.j2:3")


def test_a_profile_that_is_wrong_is_a_finding_unless_it_was_named(tmp_path: Path) -> None:
    broken = str(write_yaml(tmp_path / "broken.yaml", {"extends": "local", "scrach": "/nvme"}))
    report = check_site([], [broken, "local"], nothing)
    assert (only(report).rule.name, report.num_scripts) == ("profile", SCRIPTS)
    assert "scrach" in only(report).what
    with pytest.raises(HpcgenError, match="scrach"):
        check_site([], [broken, "local"], nothing, named=True)


def test_the_guide_explains_every_rule() -> None:
    names = [rule.name for rule in (*RULES, *OWN_RULES)]
    guide = (Path(__file__).parents[2] / "docs/templates.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \|", guide, re.MULTILINE) == names
