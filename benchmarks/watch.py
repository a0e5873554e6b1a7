"""The watch: what it finds, its false verdicts on correct trainings, and its cost.

    python benchmarks/watch.py faults [--steps 400] [--every 10] [--rates 1 0.1 0.01 0.001] [--strategies ddp fsdp]
    python benchmarks/watch.py single
    python benchmarks/watch.py clean  [--total 100000] [--each 250] [--every 5] [--part 1/4]
    python benchmarks/watch.py cost   [--rounds 7] [--steps 200] [--every 100] [--sizes small large]

Each mode writes a line for each training into `--out FILE` (default: watch-MODE.jsonl), skips those that FILE already
has, and prints a table of all that FILE has. So it can be stopped and resumed, and parts can run in parallel.

`faults`: on rank 1 of three, or with the strategy `single` on a single rank, a bit is flipped (the highest of the
mantissa) in an activation, a gradient, a weight, the optimizer's state or a reduced gradient, in a fraction of the
passes or updates, or the weights drift by 1e-7 in each update: `tests/watch/faults.py`. The output is the verdict, and
after how many checks it came, from the first time that the fault struck. `single`: a bit flips once, in a
training with a check every 5 steps, at each moment of a step (`tests/watch/strikes.py`): at a check, just before it, or
between checks. The output is how many have the right verdict and rank. `clean`: longer versions of the trainings of
`same_results_cases.py`, which are those of all recipes at tiny sizes and more, each with and without
`compute.deterministic`, with a check every few steps. Any verdict there is false. `cost`: the processor time of a rank,
with and without the watch in turn, with one micro-batch per step; and the fraction of it that is spent on checks, which
a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tests.watch import bench, cases, strikes  # noqa: E402
from tests.watch.faults import KINDS  # noqa: E402

Job = dict[str, Any]


# ---- the trainings


def faults(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Each fault, at each rate, under each strategy."""
    from tests.ranks import run_ranks

    for strategy, kind, rate in itertools.product(options.strategies, KINDS, options.rates):
        name = f"{strategy} {kind} {rate:g}"
        if kind == "drift" and rate != 1:
            continue
        if (yield name, {}):
            continue
        world, rank = (1, 0) if strategy == "single" else (3, 1)
        settings = cases.settings(
            world,
            strategy,
            train={"steps": options.steps},
            watch={"every": options.every},
            checkpoint={"every_steps": options.every * 5, "keep_last": 2},
        )
        fault = {"kind": kind, "share": rate, "after": 25, "seed": 1, "rank": rank}
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            answers = run_ranks(world, bench.lying, fault, settings, run)
            verdict = cases.verdict_of(run)
        struck = answers[rank]["struck"]
        about = {"struck": len(struck), "verdict": None, "checks": None}
        if verdict is not None and struck:
            # A check of step N comes before its update: a fault in step N's update is for the next check.
            about["checks"] = -(-verdict["step"] // options.every) - struck[0] // options.every
            about |= {"verdict": verdict["kind"], "ranks": verdict["ranks"], "tensor": verdict["tensor"]}
        yield name, about


def single(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """A bit that flips once: of each kind, at each moment of a step, at a check, just before it, and between checks."""
    from tests.ranks import run_ranks

    for (strategy, world), (kind, moment, step) in itertools.product(strikes.STRATEGIES, strikes.cases()):
        name = f"{strategy} {world}: {kind}, {moment} {step}"
        if (yield name, {}):
            continue
        rank, right = min(1, world - 1), strikes.right_verdict(strategy, kind, moment, step)
        strike = {"kind": kind, "moment": moment, "step": step, "rank": rank}
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder, "run")
            answers = run_ranks(world, strikes.struck, strike, strikes.settings_for(strategy, world), run)
            verdict = cases.verdict_of(run) or {"kind": None, "ranks": []}
        assert answers[rank]["struck"], name
        is_right = verdict["kind"] == right and (right is None or verdict["ranks"] == [rank])
        about = {"group": f"{strategy} {world}", "right": is_right, "expected": right, "error": answers[0]["error"]}
        yield name, about | {"verdict": verdict["kind"], "ranks": verdict["ranks"]}


def clean(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Correct trainings, until the requested total of steps is reached."""
    import yaml
    from same_results_cases import all_cases, write_data

    from tests.ranks import run_ranks

    number, of = (int(one) for one in options.part.split("/"))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_data(data)
        found = [one for one in all_cases(data) if len(one.starts) == 1 and not one.commands and not one.config_of]
        found = _in_turn([one for one in found if one.starts[0][0] <= options.most_ranks])
        planned = 0
        for seed in itertools.count():
            for case, deterministic in itertools.product(found, (False, True)):
                planned += options.each
                if planned > options.total:
                    return
                name = f"{case.name} seed {seed}{' deterministic' if deterministic else ''}"
                if (planned // options.each) % of != number % of:
                    continue
                if (yield name, {}):
                    continue
                ranks, keys = case.starts[0]
                more = {"train.steps": options.each, "train.eval_every_steps": 0, "train.epochs": None, "seed": seed}
                more |= {"train.eval_every_epochs": None, "watch.every": options.every, "log.every_steps": 50}
                more |= {"compute.deterministic": deterministic, "train.stop_when": None, "checkpoint.keep_best": None}
                run, file = Path(folder, "run"), Path(folder, "config.yaml")
                file.write_text(yaml.safe_dump(_nested(keys | more)))
                begun = time.perf_counter()
                answers = run_ranks(ranks, bench.right, str(file), str(run))
                verdict = cases.verdict_of(run)
                log = (run / "train.log").read_text() if (run / "train.log").exists() else ""
                notes = [line for line in log.splitlines() if "the watch" in line or "warning: step" in line]
                _delete(run)
                error = next((one["error"] for one in answers if one["error"]), "")
                yield (
                    name,
                    {"steps": options.each, "verdict": verdict and verdict["kind"], "error": error[:400]}
                    | {"notes": notes[:3], "seconds": round(time.perf_counter() - begun, 1)},
                )


def cost(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Processor time with the watch and without."""
    from tests import runs
    from tests.ranks import run_ranks

    for size, (ranks, strategy) in itertools.product(options.sizes, ((1, "single"), (2, "ddp"), (2, "fsdp"))):
        name = f"{size} {strategy} {ranks}"
        if (yield name, {}):
            continue
        # A training ends with a check, which `every` steps must pay for. Only intervals between two checks are
        # complete.
        steps = max(3 * options.every, options.steps if size == "small" else options.steps // 2)
        settings = runs.config(
            batch={"global": 32 * ranks, "micro": 32},
            train={"steps": -(-steps // options.every) * options.every},
            parallel={"strategy": strategy},
            log={"every_steps": 50},
        )
        pairs = run_ranks(ranks, bench.timed, size, settings, options.every, options.rounds, timeout_s=3600)
        ratios = [watched / plain for of_rank in pairs for plain, watched, *_ in of_rank]
        times = [(check, step) for of_rank in pairs for *_, check, step in of_rank]
        low, middle, high = statistics.quantiles(ratios, n=4)
        about = {"ratio": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}
        about["share"] = round(statistics.median(check / (options.every * step) for check, step in times), 4)
        about["check_ms"], about["step_ms"] = (
            round(1000 * statistics.median(of), 1) for of in zip(*times, strict=True)
        )
        yield name, about | {"plain_s": round(statistics.median(plain for plain, *_ in pairs[0]), 3)}


def _in_turn(found: list[Any]) -> list[Any]:
    """The cases in an order that spreads each recipe evenly, so that a part of them covers all recipes."""
    recipes = [one.name.split("/")[0] for one in found]
    shares = [(recipes[:place].count(recipe) + 0.5) / recipes.count(recipe) for place, recipe in enumerate(recipes)]
    return [found[place] for place in sorted(range(len(found)), key=shares.__getitem__)]


def _nested(keys: Job) -> Job:
    found: Job = {}
    for path, value in keys.items():
        *sections, key = path.split(".") if "." in path else [path]
        inside = found
        for section in sections:
            inside = inside.setdefault(section, {})
        if value is not None:
            inside[key] = value | inside.get(key, {}) if isinstance(value, dict) else value
    return found


def _delete(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


# ---- what is printed


def table(mode: str, done: dict[str, Job]) -> None:
    if mode == "faults":
        print(f"{'strategy, fault, rate':<30}{'struck':>7}{'checks':>8}  verdict")
        for name, one in done.items():
            verdict = f"{one['verdict']} {one.get('ranks')} {one.get('tensor')}" if one["verdict"] else "nothing found"
            print(f"{name:<30}{one['struck']:>7}{one['checks'] if one['checks'] is not None else '':>8}  {verdict}")
    elif mode == "single":
        for group in dict.fromkeys(one["group"] for one in done.values()):
            of = [one for one in done.values() if one["group"] == group]
            seen = [one for one in of if one["expected"] is not None]
            right, blind = sum(one["right"] for one in seen), [one for one in of if one["expected"] is None]
            wrong = sum(one["verdict"] is not None for one in blind)
            print(
                f"{group:<10}{right} of {len(seen)} right; {len(blind)} that no check can see, {wrong} with a verdict"
            )
        for name, one in done.items():
            if not one["right"]:
                print(f"  {name}: {one['verdict']} {one['ranks']}, and not {one['expected']}: {one['error'][:200]}")
    elif mode == "clean":
        wrong = {name: one for name, one in done.items() if one["error"]}
        print(f"{sum(one['steps'] for one in done.values()):,} steps in {len(done)} trainings, {len(wrong)} errors")
        for name, one in done.items():
            for line in [*([f"ERROR {one['error']}"] if one["error"] else []), *one["notes"]]:
                print(f"  {name}: {line[:300]}")
    else:
        for name, one in done.items():
            times = f"{one['check_ms']} ms per check, {one['step_ms']} ms per step"
            print(f"{name:<16} fraction of the checks {100 * one['share']:.2f} %: {times}; ratio {one['ratio']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["faults", "single", "clean", "cost"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int)
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 0.1, 0.01, 0.001])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--total", type=int, default=100_000)
    parser.add_argument("--each", type=int, default=250)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--most-ranks", type=int, default=4, help="skip trainings on more ranks")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", choices=[*bench.SIZES], default=[*bench.SIZES])
    options = parser.parse_args()
    options.every = options.every or {"faults": 10, "clean": 5, "cost": 100}.get(options.mode, strikes.EVERY)
    out = options.out or Path(f"watch-{options.mode}.jsonl")
    done = {}
    if out.exists():
        done = {one.pop("name"): one for one in map(json.loads, out.read_text().splitlines())}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    jobs = {"faults": faults, "single": single, "clean": clean, "cost": cost}[options.mode](options)
    answer = None
    try:
        while True:
            name, about = jobs.send(answer)
            answer = None
            if not about:
                answer = name in done
                continue
            done[name] = about
            with out.open("a") as file:
                file.write(json.dumps({"name": name, **about}) + "\n")
            print(json.dumps({"name": name, **about}), flush=True)
    except StopIteration:
        table(options.mode, done)
    finally:
        from tests import ranks

        ranks.close()


if __name__ == "__main__":
    main()
