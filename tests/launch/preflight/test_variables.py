import shlex

from typer.testing import CliRunner

from lockstep.cli.application import app
from lockstep.launch.preflight import variables
from tests import rank_cases
from tests.ranks import run_ranks


def test_a_variable_has_a_line_for_each_rank_only_where_the_ranks_differ():
    ranks = [{"RANK": str(rank), "WORLD_SIZE": "2", "NCCL_DEBUG": level} for rank, level in ((0, None), (1, "INFO"))]
    assert [line.split() for line in variables.table(ranks).splitlines()] == [
        ["RANK", "rank", "0", "0"],
        ["RANK", "rank", "1", "1"],
        ["WORLD_SIZE", "all", "2", "ranks", "2"],
        ["NCCL_DEBUG", "rank", "0", "(not", "set)"],
        ["NCCL_DEBUG", "rank", "1", "INFO"],
    ]


def test_secrets_are_not_shown(monkeypatch):
    for name in ("HF_TOKEN", "TORCH_SECRET", "LOCKSTEP_API_KEY", "MY_OWN"):
        monkeypatch.setenv(name, "hidden")
    assert "hidden" not in variables.of_process().values()
    assert variables.of_process()["HF_TOKEN"] == "(not shown)"


def test_rank_0_has_the_variables_of_all_ranks():
    found = run_ranks(3, rank_cases.variables_of_ranks)
    assert [rank["LOCAL_RANK"] for rank in found[0]] == ["0", "1", "2"]
    assert found[1:] == [[], []]


def test_the_command_shows_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, shlex.split("doctor preflight toy device=cpu --env"))
    assert done.exit_code == 0, done.output
    assert "WORLD_SIZE" in done.stdout
    assert "WORLD_SIZE" not in CliRunner().invoke(app, shlex.split("doctor preflight toy device=cpu")).stdout
