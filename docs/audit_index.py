"""Write docs/audit.md: python docs/audit_index.py > docs/audit.md"""

from lockstep_audit.rules.catalogue import ALL

GROUPS = {
    "1": "Data",
    "2": "Gradients",
    "3": "Optimizers",
    "4": "Accumulation",
    "5": "Collectives and hangs",
    "6": "Evaluation and metrics",
    "7": "Files and going on",
    "8": "Devices",
}
TEXT = """# Audit: what is silently wrong in a training script

`lockstep-audit` runs your own script on several ranks, unchanged, and names what is wrong in it: file, line, ranks,
step, cause and remedy. The script may use plain DistributedDataParallel or FSDP2, Lightning, Accelerate or
transformers. The package `torch-lockstep-audit` needs only torch: no trainer is installed with it.

```
pip install torch-lockstep-audit                     # it is not on PyPI yet; in a clone: pip install ./packages/audit
lockstep-audit --nproc 2 train.py --lr 1e-3          # options of the audit come first, then the script and its own
lockstep-audit --nproc 2 -m package.train --lr 1e-3  # a module
torchrun --nproc-per-node 2 -m lockstep_audit train.py --lr 1e-3    # or under a launcher of yours
accelerate launch --multi_gpu --num_processes 2 -m lockstep_audit train.py    # or of Accelerate's
python -m lockstep_audit train.py                      # a script that starts its ranks itself: mp.spawn, Lightning
```

If torch-lockstep is installed, too, `lockstep audit` is the same command, with the same options and exit codes.

Observers inside the script write events to a file for each rank. They make no collective and draw no random number.
When the ranks have ended, rules compare the events. A short run is enough: two epochs of a few batches show most
faults. Two ranks on CPUs are enough, too.

```
train.py:10: error[LS101]: several ranks train on the same samples
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
  seen: in epoch 0 of this loader, the first 64 indices are equal (52, 50, 31, 53, 16 and 59 more) ...
  cause: no DistributedSampler: the RandomSampler draws the same order on every rank, because seeds are equal
  remedy: DataLoader(..., sampler=DistributedSampler(dataset), shuffle=False), and sampler.set_epoch(epoch)
  see docs/audit/same-data.md

lockstep-audit: 1 error, 0 warnings; 19 rules checked, 55 not exercised (-v shows why), 0 findings switched off
```

What was seen and what explains it are kept apart: the cause is `unknown` where no rule knows it. A rule that the
script did not exercise counts as not exercised, and never as passed.

## Rules

{rules}

## Options

| option | |
|---|---|
| `--nproc N` | ranks on this machine; 2 |
| `--every K` | examine every K-th step, besides the first 4; 50 |
| `--patience S` | seconds without progress after which a hang is explained and ended; 60 |
| `--no-probe` | do not read samples at the end (9 to 65 of each are read twice, and compared between ranks) |
| `--format text`, `json`, `sarif`, `github` | the form of the report |
| `--output FILE` | a file for the report; default: standard output |
| `--folder DIR` | keep the events in this new or empty folder; default: a temporary folder, which is deleted |
| `--previous DIR` | the events of the run that this run goes on from: rules LS703, LS704 |
| `--read DIR` | judge the events of a folder, and run no script |
| `--baseline FILE`, `--write-baseline FILE` | leave out findings that are known; write that file |
| `--force` | replace the files of `--output` and `--write-baseline`, if they are there |
| `--strict` | exit code 3 for warnings, too |
| `-v` | tell for each rule why the script did not exercise it |
| `--debug` | show tracebacks of all errors |
| `--version` | print the version, which is that of torch-lockstep |

Nothing is written into the folder of the script, except under a launcher of yours without `--folder`: then the events
are in `lockstep-audit-ID` in the current folder.

## How a run ends

Whatever ends a rank, the events until then are judged.

| what ends the script | |
|---|---|
| `sys.exit(N)`, an error | a report, then code 3 for a finding, else 1; under your launcher the first rank keeps N |
| `os._exit(N)` | the same: the first rank reports before it leaves |
| SIGKILL, or a launcher that kills all ranks | a report; under your launcher nobody can: `lockstep-audit --read DIR` |
| Ctrl-C | `lockstep-audit` ends the ranks, and reports what was seen; under a launcher of yours: `--read FOLDER` |
| a hang | after `--patience` seconds `lockstep-audit` ends the ranks, and exits with code 4 |
| a collective that times out or breaks | the report says where each rank was (also after SIGABRT), then code 3 |
| a script that is not there, a notebook, a wrong option | exit code 2 |

## Exit codes

| code | |
|---:|---|
| 0 | no error; warnings may have been found |
| 1 | the script failed, and no rule found an error |
| 2 | a wrong option, file or folder |
| 3 | an error was found, or with `--strict` a warning |
| 4 | the script hung, and the report says where each rank was |
| 5 | so there is no advice: no rank made a step of a torch optimizer |

## Switch a finding off

Write the reason into the script, on the line of the finding or above. A comment without a reason is not obeyed.

```
loader = DataLoader(files_of_this_rank, shuffle=True)  # lockstep: ignore[LS106] each rank has files of its own
```

Or keep all findings of today in a file, and look only at new ones: `--write-baseline known.json`, then `--baseline
known.json`. A finding is known by its rule, the name of the file and the text of the line.

## In CI

On GitHub, annotations come at the lines of a pull request. Put this step behind those that check out your repository
and install Python and what the script needs. OWNER is the owner of the repository of Lockstep:

```
- uses: OWNER/torch-lockstep@main
  with:
    script: train.py --epochs 1
    nproc: 2
```

In a test suite, the package brings a fixture for pytest, which fails the test with the report:

```
def test_the_training_is_right(lockstep_audit):
    lockstep_audit("train.py", "--epochs", 1, nproc=2)
```

`--format sarif --output audit.sarif` is for other systems. A script that hangs ends after `--patience` seconds with
exit code 4.

## The lines on the pages

The wrong and the right lines on the page of each rule stand behind these lines, and `dist.destroy_process_group()`
follows. `packages/audit/tests/test_pages.py` runs them.

```python
import contextlib
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

- A fault is found only if the run shows the fault: an uneven end of an epoch needs an epoch that ends.
- Steps are looked at closely at the beginning and then each `--every` steps. Between them, parameters are not
compared. In steps of 30 ms, observers cost 1 to 4 %, and 10 % with `--every 1`
([what they cost](../benchmarks/RESULTS.md#what-the-audits-observers-cost)).
- Several nodes: the folder of `--folder` must be on a disk that all nodes share. Or collect the files `rank-*.jsonl`
in one folder, and judge them with `lockstep-audit --read FOLDER`.
- A notebook cannot be observed, and is told so. Save it as a script: `jupyter nbconvert --to script NOTEBOOK.ipynb`.
- Not every fault has a rule. Of 40 faults in scripts by people who had not seen the audit, 36 were named at the right
line, and 4 were not seen; of the 40 of the set before, 35. On 40 odd but right scripts and 40 repaired scripts there
was no false error; on the 80 of the set before there were 2, and 108 public examples showed 2 more: all repaired
([what was found, and what was not](../benchmarks/RESULTS.md#lockstep-audit-on-scripts-of-others)).
[Public examples](audit_found.md): real faults in known projects, false alarms, and what was missed.
- False alarms that are known: LS101 where ranks answer the same prompts with other draws (rollouts of one group), LS108
with samplers that repeat samples by design (torchvision's RASampler on 4 ranks), LS703 where two networks train on each
batch and the run goes on within an accumulation. Warnings: LS601 where repeated samples are taken out by a mask or by
their ids, LS403 where labels of -100 are no part of the mean (DPO), LS211 where a divisor is by chance the number of
all samples, LS307 where a training is cut short on purpose. `# lockstep: ignore[LS101] reason` switches one off.
- What a script keeps in objects of its own is not compared between ranks. So statistics that each rank gathers for
itself are not seen, such as the running mean of observations that normalizes them: ranks may rightly hold other numbers
there, such as states of their environments, and nothing tells the ones from the others.
- The line of a finding is that of the cause where this is known: where a sampler, a module or a copy was made, where
`eval()` or `no_sync()` was called, the caller of a function that was given what it exchanges. Some lines come from the
text of the script: the `if` or `break` that decides, or the set whose order is taken. Without the text, the line is the
one where the fault was noticed.
- `accelerate launch --num_processes 2 -m lockstep_audit train.py` starts one process where it finds no GPU; add
`--multi_gpu`, and `ACCELERATE_USE_CPU=true`. Not tried: FSDP of version 1, `torch.compile`, several nodes.
- All of this was tried on CPUs with gloo. On GPUs and with NCCL nothing was tried.
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
