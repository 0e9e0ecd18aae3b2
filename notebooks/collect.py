"""collect: the numbers of finished runs, kept in notebooks/data/.

    python notebooks/collect.py runs            all runs in or below runs/
    python notebooks/collect.py runs --note X   runs that differ in what no setting says

Writes runs.csv (from summary.json and metrics.csv) and evaluate.csv (from evaluation.json), a row
for each run. A row of the same settings and seed is replaced, others stay; delete the files to
begin anew. Settings that are the defaults in all rows have no column. Shares are not in %. Runs
with a note, as those on another processor, are kept apart. measured.json (numbers) and
noted.json (whole tables, of what was measured once) are filled by hand.

Below: reading these files, choosing runs, and means over seeds. tables.py makes the texts of them.
"""
import argparse
import csv
import json
import re
import sys
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import critkl
import plots

PLACE = ("out", "name", "json", "preset", "device", "problem", "checkpoint")   # not kept
FREE = ("mode", "seed", "threads", "test_problems", "eval_every", "eval_problems")
DEFAULTS = {f.name: f.default for f in fields(critkl.Config) if f.name not in PLACE}
DEFAULTS |= {"note": "", "policy": "pretrained"}
ALIKE = [name for name in DEFAULTS if name not in FREE]   # what the runs of a group have in common
REGION = ("method", *plots.BOUNDS)


class Missing(Exception):
    """There are no runs yet for a table or a sentence."""


# ---- From run folders to rows, which are dicts of settings and numbers.

def with_interval(name, numbers):
    """(mean, low, high) as three columns."""
    return dict(zip((name, f"{name} low", f"{name} high"), numbers))

def read_settings(folder, note):
    config = json.loads((folder / "config.json").read_text())
    settings = config["settings"]
    row = DEFAULTS | {name: float(x) if isinstance(x, int) else x
                      for name, x in settings.items() if name not in PLACE}
    policy = policy_of(folder.parent, settings["checkpoint"])
    return row | dict(note=note, policy=policy, python=config["python"], torch=config["torch"])

def policy_of(runs, checkpoint):
    """Of an evaluation: pretrained, or the mode of the run in --checkpoint and what was changed
    there: "critical, alpha 0.2". That run is looked for beside the evaluation."""
    source = runs / Path(checkpoint).name / "config.json"
    if not checkpoint or not source.exists():
        return re.sub(r"-seed\d+$", "", Path(checkpoint).name) or "pretrained"
    settings = json.loads(source.read_text())["settings"]
    usual = asdict(critkl.make_config(dict(mode=settings["mode"])))
    changed = [name for name in usual if name in ALIKE and settings[name] != usual[name]]
    return ", ".join([settings["mode"], *(f"{name} {settings[name]}" for name in changed)])

def read_run(folder, note):
    row = read_settings(folder, note)
    summary = json.loads((folder / "summary.json").read_text())
    for when, name in (("before", "pretrained_accuracy"), ("after", "accuracy")):
        for digits, numbers in summary["intervals"][name].items():
            row |= with_interval(f"{digits} {when}", numbers)
        commas = {token: p[when] for token, p in summary["critical_tokens"].items()
                  if token.endswith("comma")}
        row |= {f"{token} {when}": p for token, p in commas.items()}
        row[f"commas {when}"] = sum(commas.values()) / len(commas) if commas else 0.0
    row |= {f"seconds {phase}": seconds for phase, seconds in summary["seconds"].items()}
    row |= {"peak MB": summary["peak_memory_mb"] or 0, "parameters": summary["parameters"]}
    with open(folder / "metrics.csv", newline="") as file:
        metrics = [line for line in csv.DictReader(file) if line.get("reward")]
    if metrics:
        row |= {"reward first": float(metrics[0]["reward"])}
        row |= {"reward last": float(metrics[-1]["reward"])}
        for name in ("masked", "bad", "drift_min"):
            row[f"{name} mean"] = sum(float(line[name]) for line in metrics) / len(metrics)
    return row

def read_evaluation(folder, note):
    row = read_settings(folder, note)
    result = json.loads((folder / "evaluation.json").read_text())
    for line in result["rows"]:
        for kind in ("sampled", "greedy", "expected"):
            row |= with_interval(f"{line['set']} {line['digits']} {kind}", line[kind])
    for name, numbers in result["certainty_gap"].items():
        row |= with_interval(f"gap {name}", numbers)
    return row | result["definition"]

FILES = {"runs.csv": ("summary.json", read_run),
         "evaluate.csv": ("evaluation.json", read_evaluation)}

def identity(row):
    """Of two rows with the same one the later counts."""
    return tuple(row[name] for name in (*ALIKE, "mode", "seed", "threads", "test_problems"))

def collect(folders, data, note=""):
    data.mkdir(exist_ok=True)
    for name, (needed, read) in FILES.items():
        found = [read(folder, note) for folder in plots.run_folders(folders)
                 if (folder / needed).exists()]
        rows = {identity(row): row for row in read_csv(data / name) + found}
        if rows:
            write_csv(data / name, sorted(rows.values(), key=lambda row: str(identity(row))))
        print(f"{name}: {len(found)} runs read, {len(rows)} in all")

def write_csv(path, rows):
    names = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in names if name in ("mode", "seed") or name not in DEFAULTS
             or any(row[name] != DEFAULTS[name] for row in rows)]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in rows:
            cells = [row.get(name, "") for name in names]
            writer.writerow([x if isinstance(x, str) else f"{x:.9g}" for x in cells])

# ---- From the files to numbers.

def read_csv(path):
    """The rows of a file, none if there is none; numbers as float."""
    def value(text):
        try:
            return float(text)
        except ValueError:
            return text

    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [DEFAULTS | {name: x if name == "note" else value(x)
                            for name, x in line.items() if x != ""}
                for line in csv.DictReader(file)]

def load(data=HERE / "data"):
    """What the files hold. all_runs has those with a note too."""
    all_runs, evaluations = read_csv(data / "runs.csv"), read_csv(data / "evaluate.csv")
    for row in all_runs:
        row["region"] = region(row)
    by_hand = {}
    for name in ("measured", "noted"):
        path = data / f"{name}.json"
        by_hand[name] = json.loads(path.read_text()) if path.exists() else {}
    return SimpleNamespace(
        all_runs=all_runs, runs=[row for row in all_runs if not row["note"]],
        evaluations=[row for row in evaluations if not row["note"]],
        **by_hand)

def region(row):
    """The method, and what was changed of it: "`dppo`, delta 0.05"."""
    usual = critkl.make_config(dict(mode="none", method=row["method"]))
    changed = [name for name in plots.BOUNDS if row[name] != getattr(usual, name)]
    texts = [f"{name.replace('_', ' ')} {row[name]}".removesuffix(".0") for name in changed]
    return ", ".join([f"`{row['method']}`", *texts])

def pick(rows, *vary, policy="pretrained", note="", **given):
    """The rows with the settings `given`; of all others, but those in `vary`, with the default.
    A mode means its penalty and method: --mode dppo is like --mode none --method dppo."""
    wanted = asdict(critkl.make_config(given)) | dict(note=note, policy=policy)
    names = [name for name in ALIKE if name not in vary]
    return [row for row in rows if all(row[name] == wanted[name] for name in names)]

def strained(data, penalty="none"):
    """[Q]: the runs on fixed problems with a penalty. Of several such sets the largest."""
    sets = {}
    for row in data.runs:
        if row["fixed"] and row["penalty"] == penalty:
            rest = {name: x for name, x in row.items() if name in critkl.Config.__annotations__
                    and name not in (*REGION, "mode", "seed")}
            sets.setdefault(str(rest), []).append(row)
    if not sets:
        raise Missing(f"no runs with --mode {penalty} --fixed")
    return max(sets.values(), key=len)

def by_seed(rows):
    """{seed: row}. Of several the one with the most test problems, then with the fewest threads."""
    rows = sorted(rows, key=lambda row: (row["seed"], row["test_problems"], -row["threads"]))
    return {int(row["seed"]): row for row in rows}

def values(rows, column, scale=100):
    """A number of each seed, in %."""
    found = [scale * row[column] for row in by_seed(rows).values() if column in row]
    if not found:
        raise Missing(f"no runs with {column!r}")
    return found

def plus_minus(numbers, places=1):
    """Mean and half of the 95% interval (Student t); of one number itself."""
    mean, half = plots.interval(numbers)
    return f"{mean:z.{places}f}" + (f" ± {half:.{places}f}" if len(numbers) > 1 else "")

def mean(rows, column, places=1, scale=100):
    return plus_minus(values(rows, column, scale), places)

def plain(rows, column, places=0):
    """The mean alone."""
    return f"{plots.interval(values(rows, column))[0]:z.{places}f}"

def both(rows, when="after", places=0):
    """The means at N and at N+1: "98 / 97"."""
    return f"{plain(rows, f'N {when}', places)} / {plain(rows, f'N+1 {when}', places)}"

def differences(rows, others, column="N+1 after"):
    """In points, of each seed that both have."""
    rows, others = by_seed(rows), by_seed(others)
    seeds = sorted(rows.keys() & others.keys())
    if not seeds:
        raise Missing("no seed that both have")
    return [100 * (rows[seed][column] - others[seed][column]) for seed in seeds]

def paired(rows, others, column="N+1 after"):
    """Mean difference in points over the seeds that both have."""
    return plus_minus(differences(rows, others, column))

def with_low_high(rows, column, places=1, scale=100):
    """Mean over seeds; of one seed the interval over its problems: "31 (23 to 41)"."""
    if len(by_seed(rows)) != 1:
        return mean(rows, column, places, scale)
    numbers = [values(rows, column + end, scale)[0] for end in ("", " low", " high")]
    return "{} ({} to {})".format(*(f"{x:z.{places}f}" for x in numbers))

def main(argv=None):
    parser = argparse.ArgumentParser("collect.py", argparse.SUPPRESS, __doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="runs, or what holds them")
    parser.add_argument("--note", default="", help="what differs in these runs beside the settings")
    parser.add_argument("--data", default=HERE / "data", type=Path, help="where the files are")
    args = parser.parse_args(argv)
    try:
        collect(args.folders, args.data, args.note)
    except (OSError, ValueError, KeyError) as error:
        parser.error(" ".join(f"{type(error).__name__}: {error}".split()))

if __name__ == "__main__":
    main()
