"""The report: text, JSON, SARIF, annotations, comments and baselines that switch findings off, exit codes."""

import json
import re

import pytest
import yaml

from lockstep_audit import command as command_line
from lockstep_audit import judge
from lockstep_audit.errors import AuditUsageError
from lockstep_audit.events import EventWriter
from lockstep_audit.findings import Rule
from lockstep_audit.report import formats
from lockstep_audit.report.outcome import outcome, write_baseline
from lockstep_audit.rules.catalogue import ALL, BY_ID, EXPLAINED
from lockstep_audit.settings import Settings
from packages.audit.tests.made_events import Script, dealt, parts, whole
from packages.audit.tests.processes import ROOT

LINES = ["import torch"] * 9 + ["loader = DataLoader(data, shuffle=True)", *["..."] * 60]


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Events of a script with one fault, whose file can be read. Called with changed lines, by number."""
    monkeypatch.chdir(tmp_path)

    def write(**changed):
        lines = [changed.get(f"line_{number}", line) for number, line in enumerate(LINES, 1)]
        (tmp_path / "train.py").write_text("\n".join(lines))
        made = Script().optimizer().epoch(whole(), dataset_size=16).exit()
        for event in made.events:
            for key in ("at", "made_at"):
                if key in event:
                    event[key] = [str(tmp_path / "train.py"), *event[key][1:]]
            if event["kind"] == "start":
                event["script"] = str(tmp_path / "train.py")
        return made

    return write


def written(made, folder):
    """The events in files, as ranks write them."""
    writers = {rank: EventWriter(folder, rank) for rank in range(made.world)}
    for event in made.events:
        writers[event["rank"]].step = event["step"]
        known = ("kind", "rank", "number", "time", "step")
        writers[event["rank"]].write(event["kind"], **{k: v for k, v in event.items() if k not in known})
    return folder


def test_the_text_has_place_source_evidence_cause_remedy_and_page(script):
    text = formats.text(outcome(script().history))
    first, source, seen, cause, remedy, page, _, ran, left, last = text.splitlines()
    assert ran.startswith("seen: 2 ranks, ")
    assert "DDP with 2 parameters" in ran
    assert left.startswith("not judged: ")
    assert first == "train.py:10: error[LS101]: several ranks train on the same samples"
    assert source.strip() == "loader = DataLoader(data, shuffle=True)"
    assert seen.startswith("  seen: in epoch 0 of this loader")
    assert cause.startswith("  cause: no DistributedSampler")
    assert remedy.startswith("  remedy: DataLoader(")
    assert page == "  see lockstep-audit --explain LS101"
    assert last.startswith("lockstep-audit: 1 error, 0 warnings; ")
    assert "not exercised: LS801 shared-gpu: no rank used a GPU" in formats.text(
        outcome(script().history), verbose=True
    )


def test_an_unknown_cause_is_said_to_be_unknown():
    made = Script().optimizer().step(digest=str).step(digest=str)
    assert "  cause: unknown\n" in formats.text(outcome(made.history))


def test_json_has_all_findings_and_why_rules_were_not_exercised(script):
    told = json.loads(formats.as_json(outcome(script().history), 1))
    assert (told["schema"], told["exit_code"], told["findings"][0]["rule"], told["findings"][0]["line"]) == (
        1,
        1,
        "LS101",
        10,
    )
    assert told["findings"][0]["ranks"] == [0, 1]
    assert {*told["checked"]} | {*told["not_exercised"]} == {rule.id for rule in ALL}


def test_sarif_has_what_version_2_1_0_requires(script):
    told = json.loads(formats.sarif(outcome(script().history)))
    assert told["version"] == "2.1.0"
    (run,) = told["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"]
    assert [rule["id"] for rule in driver["rules"]] == [rule.id for rule in ALL]
    assert {rule["defaultConfiguration"]["level"] for rule in driver["rules"]} == {"error", "warning"}
    (result,) = run["results"]
    assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "LS101"
    assert result["message"]["text"]
    (location,) = result["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "train.py"
    assert location["physicalLocation"]["region"]["startLine"] == 10


def test_annotations_escape_what_github_reads_as_its_own(script):
    first = formats.github(outcome(script().history)).splitlines()[0]
    assert first.startswith(
        "::error file=train.py,line=10,title=LS101 several ranks train on the same samples::in epoch 0"
    )
    assert "%0Acause: no DistributedSampler" in first
    assert formats._property("50%, a:b") == "50%25%2C a%3Ab"


@pytest.mark.parametrize("number", [9, 10], ids=["above", "same line"])
def test_a_comment_with_a_reason_switches_a_finding_off(script, number):
    code = "loader = DataLoader(data, shuffle=True)" if number == 10 else ""
    made = script(**{f"line_{number}": f"{code}  # lockstep: ignore[LS101, LS106] each rank trains a copy on purpose"})
    result = outcome(made.history)
    assert result.findings == []
    assert "LS101 several ranks train on the same samples: each rank trains a copy on purpose" in formats.text(result)
    assert json.loads(formats.sarif(result))["runs"][0]["results"][0]["suppressions"][0]["justification"]


def test_a_comment_without_a_reason_or_with_an_unknown_id_is_told(script):
    result = outcome(
        script(line_10="loader = 1  # lockstep: ignore[LS101]", line_3="# lockstep: ignore[LS999] why").history
    )
    assert len(result.findings) == 1
    assert result.notes == [
        "train.py:3: there is no rule LS999 to ignore",
        "train.py:10: ignore[LS101] has no effect without a reason after it",
    ]


def test_a_baseline_leaves_out_known_findings_also_where_lines_have_moved(script, tmp_path):
    write_baseline(tmp_path / "known.json", outcome(script().history).findings)
    assert outcome(script().history, tmp_path / "known.json").findings == []
    other = script(line_10="loader = DataLoader(other, shuffle=True)")
    import linecache

    linecache.clearcache()
    assert len(outcome(other.history, tmp_path / "known.json").findings) == 1
    with pytest.raises(AuditUsageError, match="is not a baseline"):
        outcome(script().history, tmp_path / "train.py")


def test_findings_that_follow_from_others_are_left_out():
    assert {id for row in EXPLAINED.items() for id in (row[0], *row[1])} <= BY_ID.keys()
    made = Script().optimizer().step(digest=str, hyperparameters=lambda rank: [{"lr": 0.1 + rank}]).step(digest=str)
    assert made.ids() == {"LS301"} or made.ids() == {"LS201", "LS301"} - {"LS201"}


def test_a_rule_that_fails_does_not_keep_others_from_speaking(script):
    broken = Rule("LS101", "same-data", "x", "error", lambda history: 1 / 0)
    result = outcome(script().history, rules=[broken, BY_ID["LS206"]])
    assert result.notes == ["LS101 could not be checked: ZeroDivisionError: division by zero"]
    assert result.checked == ["LS206"]


def right():
    return Script().optimizer().epoch(parts(), distributed=dealt(), dataset_size=16)


@pytest.mark.parametrize(
    ("made", "settings", "verdict", "code"),
    [
        (right().exit(), {}, "clean", 0),
        (Script().optimizer().epoch(whole(), dataset_size=16).exit(), {}, "findings", 3),
        (Script(how="data_parallel").optimizer().step().exit(), {}, "clean", 0),
        (Script(how="data_parallel").optimizer().step().exit(), {"strict": True}, "findings", 3),
        (right().exit(code=1, error={"type": "ValueError", "message": "no file"}), {}, "failed", 1),
        (Script().optimizer().add("stuck", at=["t.py", 3, "f"], stacks={}), {}, "hang", 3),
        (Script().exit(), {}, "inconclusive", 1),
    ],
    ids=["clean", "error", "warning", "strict", "failed", "hang", "inconclusive"],
)
def test_exit_codes(made, settings, verdict, code, tmp_path, capsys):
    found = judge.judge(written(made, tmp_path / "events"), Settings(**settings))
    assert (found.value, found.exit_code) == (verdict, code)
    assert "lockstep-audit: " in capsys.readouterr().out


@pytest.mark.parametrize("loads", [False, True])
def test_a_script_that_trains_nothing_is_inconclusive_with_the_reason_and_a_remedy(loads, tmp_path, capsys):
    made = Script().exit() if not loads else Script().add("state", at=["/t.py", 3, "f"], what="model").exit()
    folder = written(made, tmp_path / "events")
    assert judge.judge(folder, Settings()) is judge.AuditVerdict.INCONCLUSIVE
    why, remedy, last = capsys.readouterr().out.splitlines()[-3:]
    assert why.startswith("inconclusive: no rank stepped a torch optimizer")
    assert ("t.py:3 loaded a checkpoint" in why) == ("new run directory" in remedy) == loads
    assert remedy.startswith("  remedy: audit a ")
    assert last.startswith("lockstep-audit: inconclusive; ")
    judge.judge(folder, Settings("json"))
    told = json.loads(capsys.readouterr().out)
    assert (told["exit_code"], told["inconclusive"]["remedy"]) == (1, remedy.removeprefix("  remedy: "))


@pytest.mark.parametrize("world", [1, 2])
def test_one_rank_says_how_many_rules_were_not_exercised(world, tmp_path, capsys):
    writer = EventWriter(tmp_path, 0)
    writer.write("start", world_size=world)
    writer.write("step", optimizer=0, index=0)
    assert judge.judge(tmp_path, Settings()) is judge.AuditVerdict.CLEAN
    out = capsys.readouterr().out
    many = re.search(r"checked, (\d+) not exercised", out)[1]
    note = f"note: one rank ran: {many} rules were not exercised; those that compare ranks need --nproc 2\n"
    assert (note in out) == (world == 1)


def test_the_page_of_a_rule_is_printed(capsys):
    assert command_line.main(["--explain", "ls506"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "audit" / "no-group.md").read_text()
    assert command_line.main(["--explain", "LS999"]) == 2
    assert "there is no rule LS999" in capsys.readouterr().err


def test_the_report_goes_to_a_file_and_a_baseline_is_written(script, tmp_path, capsys):
    folder = written(script(), tmp_path / "events")
    settings = Settings("json", tmp_path / "report.json", write_baseline=tmp_path / "known.json")
    assert judge.judge(folder, settings) is judge.AuditVerdict.FINDINGS
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "report.json").read_text())["exit_code"] == judge.FINDINGS
    assert judge.judge(folder, Settings(baseline=tmp_path / "known.json")) is judge.AuditVerdict.CLEAN
    with pytest.raises(AuditUsageError, match="contains no events"):
        judge.judge(tmp_path / "none", Settings())


def test_rank_0_waits_for_the_last_events_of_others(tmp_path):
    folder = written(right().exit(1), tmp_path / "events")
    assert judge.judge_here(folder, Settings()) is judge.AuditVerdict.CLEAN


def test_the_github_action_calls_the_command_with_its_own_options():
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    command = action["runs"]["steps"][-1]["run"].split()
    assert command[0] == "lockstep-audit"
    given = [word for word in command if word.startswith("--")]
    assert given == ["--format", "--nproc"]
    assert command_line._parser("lockstep-audit").parse_args(["--format", "github", "--nproc", "2"])
