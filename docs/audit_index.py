"""Write docs/audit.md: python docs/audit_index.py > docs/audit.md"""

from lockstep_audit.rules.catalogue import ALL

GROUPS = {
    "1": "Data",
    "2": "Gradients",
    "3": "Optimizers",
    "4": "Accumulation",
    "5": "Collectives and hangs",
    "6": "Evaluation and metrics",
    "7": "Files and resuming",
    "8": "Devices",
}
TEXT = """# Audit: what is silently wrong in a training script

`lockstep-audit` runs your own script on several ranks, unchanged, and names what is wrong in it: file, line, ranks,
step, cause and remedy. The script may use plain DistributedDataParallel or FSDP2, a [`lockstep.Loop`](loop.md),
Lightning, Accelerate or transformers. The package `torch-lockstep-audit` needs only torch, and installs no trainer.

```
pip install torch-lockstep-audit                     # it is not on PyPI yet; in a clone: pip install ./packages/audit
lockstep-audit --nproc 2 train.py --lr 1e-3          # options of the audit, then the script and its options
lockstep-audit --nproc 2 -m package.train --lr 1e-3  # a module
torchrun --nproc-per-node 2 -m lockstep_audit train.py --lr 1e-3    # or under your own launcher
accelerate launch --multi_gpu --num_processes 2 -m lockstep_audit train.py    # or Accelerate's
python -m lockstep_audit train.py                      # a script that starts its ranks itself: mp.spawn, Lightning
```

If torch-lockstep is also installed, `lockstep audit` is the same command, with the same options and exit codes.

In each process of the script, the audit observes calls of torch and Python, and writes what it sees (*events*) to a
file for each rank. It calls no collectives and draws no random numbers. When the ranks have ended, the audit's rules
compare the events. A short run is enough: two epochs of a few batches show most faults. Two ranks on CPUs are also
enough.

```
train.py:10: error[LS101]: several ranks train on the same samples
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
  seen: in epoch 0 of this loader, the first 64 indices are equal (20, 3, 29, 25, 59 and 59 more) ...
  cause: no DistributedSampler: the RandomSampler draws the same order on every rank, because seeds are equal
  remedy: DataLoader(..., sampler=DistributedSampler(dataset), shuffle=False), and sampler.set_epoch(epoch)
  see lockstep-audit --explain LS101

seen: 2 ranks, 16 steps, 1 loader, 0 evaluations, DDP with 4 parameters
not judged: the order of epochs (fewer than two), evaluation (none was seen), saving (no file was written), ...
lockstep-audit: 1 error, 0 warnings; 18 rules checked, 62 not exercised (-v shows why), 0 findings switched off
```

The report separates what was seen from its explanation: the cause is `unknown` if no rule can explain the finding. A
rule that the script did not exercise counts as not exercised, never as passed.

## Rules

{rules}

## Options

| option | |
|---|---|
| `--nproc N` | ranks on this machine; 2 |
| `--every K` | examine each K-th step closely, in addition to the first 4; 50 |
| `--patience S` | seconds without progress after which a hang is explained and ended; 60 |
| `--no-probe` | skip the last check, which reads 9 to 65 samples of each data set twice and compares ranks |
| `--format text`, `json`, `sarif`, `github` | the format of the report |
| `--output FILE` | a file for the report; default: standard output |
| `--folder DIR` | keep the events in this new or empty folder; default: a temporary folder, which is deleted |
| `--previous DIR` | the events of the run that this run resumes: rules LS703, LS704 |
| `--read DIR` | judge the events of a folder, without running a script |
| `--baseline FILE`, `--write-baseline FILE` | leave out known findings; write that file |
| `--force` | replace the files of `--output` and `--write-baseline`, if they exist |
| `--strict` | use exit code 3 for warnings, too |
| `--explain RULE` | print the page of a rule, such as LS101, without running a script |
| `-v` | print for each rule why the script did not exercise it |
| `--debug` | show tracebacks of all errors |
| `--version` | print the version, which is the same as that of torch-lockstep |

The audit writes nothing into the folder of the script. There is one exception: under your own launcher without
`--folder`, the events are in `lockstep-audit-ID` in the current folder.

## How a run ends

Whatever ends a rank, the audit judges the events that the rank has written until then.

| what ends the script | |
|---|---|
| `sys.exit(N)`, an error | a report, then code 3 for a finding, else 1; under your launcher the first rank keeps N |
| `os._exit(N)` | the same: the first rank reports before it leaves |
| SIGKILL, or a launcher that kills all ranks | a report; under your own launcher: `lockstep-audit --read DIR` |
| Ctrl-C | `lockstep-audit` ends the ranks, and reports what was seen; under your own launcher: `--read DIR` |
| a hang | after `--patience` seconds without progress, `lockstep-audit` ends the ranks, and exits with code 3 |
| a collective that times out or breaks | the report shows where each rank was (also after SIGABRT), then code 3 |
| a missing script, a notebook, a wrong option | exit code 2 |

## Exit codes

The [rule of all commands](commands.md#exit-codes):

| code | |
|---:|---|
| 0 | no error; warnings may have been found |
| 1 | the script failed, and no rule found an error; or no rank made a step of a torch optimizer |
| 2 | a wrong option, file or folder |
| 3 | a rule found an error, or with `--strict` a warning; a hang is an error (the report shows each rank's place) |

## Switch a finding off

Write the reason into the script, on the line of the finding or above it. A comment without a reason has no effect.

```
loader = DataLoader(files_of_this_rank, shuffle=True)  # lockstep: ignore[LS106] each rank has its own files
```

Or save today's findings in a file, and see only new ones: `--write-baseline known.json`, then
`--baseline known.json`. The rule, the name of the file and the text of the line identify a finding.

## In CI

On GitHub, annotations appear at the lines of a pull request. Your workflow first needs steps that check out your
repository, and that install Python and the packages of the script. Put this step after them. OWNER is the owner of the
repository of Lockstep:

```
- uses: OWNER/torch-lockstep@main
  with:
    script: train.py --epochs 1
    nproc: 2
```

For a test suite, the package contains a pytest fixture, which fails the test with the report:

```
def test_the_training_is_right(lockstep_audit):
    lockstep_audit("train.py", "--epochs", 1, nproc=2)
```

`--format sarif --output audit.sarif` is for other systems. If a script hangs, the audit ends it after `--patience`
seconds, with exit code 3.

## The lines on the pages

The pages of rules show wrong and right lines. To run them, put the following lines before them, and
`dist.destroy_process_group()` after them. `packages/audit/tests/test_pages.py` runs the lines of all pages in this way.

```python
import contextlib
import copy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 10), torch.randint(0, 2, (64,)))
net = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 2))
```

## Limits

- **Coverage.** The audit finds a fault only if the run shows it. For example, ranks with different numbers of
  batches show only if the run reaches the end of an epoch.
- **Steps.** The audit examines the first 4 steps closely, and then each K-th step (`--every K`). It does not compare
  parameters in the steps in between. With steps of 30 ms, observing costs 1 to 4 % of the time, and about 15 %
  with `--every 1` ([what it costs](../benchmarks/RESULTS.md#what-the-audits-observers-cost)).
- **Several nodes.** The folder of `--folder` must be on a disk that all nodes share. Otherwise collect the files
  `rank-*.jsonl` in one folder, and judge them with `lockstep-audit --read DIR`.
- **Notebooks** cannot be observed, and end with an error. Save the notebook as a script:
  `jupyter nbconvert --to script NOTEBOOK.ipynb`.
- **Missed faults.** Not every fault has a rule. The newest set has 20 faults, in scripts by two people who had not
  seen the rules. The audit named 15 of them, all at the right line, and missed 5, such as an average of weights that
  a resumed run begins again ([what was found, and what was
  not](../benchmarks/RESULTS.md#lockstep-audit-on-scripts-of-others)).
- **False errors.** On the 32 correct scripts of that set there was no false error, and 2 false warnings. On the 52
  scripts of the eleventh set there were 4 false errors, which have been fixed; each is a test now. On the 124
  correct scripts of the ninth, tenth and twelfth sets there was none. [Public examples](audit_found.md): real faults
  in known projects, false alarms, and what was missed.
- **Known false alarms**; `# lockstep: ignore[LS101] reason` switches one off:
    - LS101 if ranks answer the same prompts with different draws (rollouts of one group);
    - LS108 with samplers that repeat samples on purpose (torchvision's RASampler on 4 ranks);
    - LS703 if two networks train on each batch and the run resumes within an accumulation;
    - warning LS601 if repeated samples are taken out by a mask;
    - warning LS403 if labels of -100 do not count in the mean (DPO);
    - warning LS307 if a training is cut short on purpose.
- **A script's own objects** are not compared between ranks, except dictionaries that number words, and buffers of
  modules. So the audit does not notice if each rank normalizes its observations with a running mean in a plain
  tensor. In other objects, such as the states of environments, different numbers on each rank are correct. The
  audit cannot distinguish the two.
- **Lines.** If the cause of a finding is known, the finding shows the line of the cause: the line that created a
  sampler, a module or a copy, or that called `eval()`, `no_sync()` or a function that communicates between ranks. For
  some findings, the audit looks for the line in the source of the script. It may be an `if` or `break` at which ranks
  take different branches, or a Python `set` over which the script iterates. Without the source, the finding shows the
  line at which the audit noticed the fault.
- **Accelerate.** `accelerate launch --num_processes 2 -m lockstep_audit train.py` starts only one process if it finds
  no GPU. Then add `--multi_gpu`, and `ACCELERATE_USE_CPU=true`.
- **Not tried**: FSDP of version 1, `torch.compile`, several nodes, GPUs and NCCL. Everything else on this page was
  tried on CPUs with gloo.
"""


def table() -> str:
    """The rules, as a table for each group."""
    lines = []
    for digit, title in GROUPS.items():
        lines += [f"### {title}", "", "| rule | | |", "|---|---|---|"]
        for rule in ALL:
            if rule.id[2] == digit:
                lines.append(f"| [{rule.id} {rule.name}](audit/{rule.name}.md) | {rule.severity} | {rule.title} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def page() -> str:
    """The whole page."""
    return TEXT.replace("{rules}", table())


if __name__ == "__main__":
    print(page(), end="")
