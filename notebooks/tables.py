"""tables: writes the numbers in notebooks/data/ into README.md, results.md and speed.md.

    python notebooks/tables.py          writes them
    python notebooks/tables.py check    only says what differs; test_tables.py fails where it does

A table (TABLES) stands in a text below a line <!-- table: NAME -->, up to the next empty line.
Of a sentence (SENTENCES) the numbers are replaced; where its lines are broken does not matter.
What has no runs yet is left as it is. The files are made by collect.py.
"""
import argparse
import math
import re
import statistics
import sys
import textwrap

from collect import (
    REGION, ROOT, Missing, both, by_seed, differences, load, mean, paired, pick, plain, plus_minus,
    strained, with_low_high)
from sentences import ALLOWED, SENTENCES, WORDS, count

import critkl
import plots

PENALTIES = ("none", "standard", "critical")
COMMAS = [f"line {line}, {which}" for line in (1, 2, 3) for which in ("first", "second")]
DEGREE = ("dial", "mistakes", "pretrain_steps")
CERTAINTY = ("certainty", "certainty_temperature", "temperature")
COMPARED = (
    ("`dppo`", "`ppo`"), ("`dppo`", "`grpo_clip_higher`"), ("`dppo`", "`dppo`, anchor recomputed"),
    ("`grpo_clip_higher`", "`minirl`"), ("`minirl`", "`minirl_tis`"),
    ("`dppo`, divergence binary_kl, delta 0.05", "`dppo`"),
    ("`dppo`, divergence topk_tv", "`dppo`"),
    ("`dppo`, divergence topk_kl, delta 0.05", "`dppo`, divergence binary_kl, delta 0.05"),
    ("`dppo`", "`negative_only`"),
    *((f"`grpo_clip_higher`, relax {ends}", "`grpo_clip_higher`")
      for ends in ("high", "low", "both")))

# ---- Tables: functions of the data to rows of cells, the header first.

def main_runs(data, note=""):
    """Label, runs and column's end: of the pretrained models, then of each penalty."""
    found = {mode: pick(data.all_runs, mode=mode, note=note) for mode in PENALTIES}
    return [("pretrained", sum(found.values(), []), "before"),
            *((mode, rows, "after") for mode, rows in found.items())]

def success(rows, when):
    return [mean(rows, f"{name} {when}") for name in ("N", "N+1", "commas")]

def readme(data):
    pretrained = main_runs(data)[0][1]
    problems = max([int(row["test_problems"]) for row in pretrained], default=0)
    title = f"{count(pretrained)} seeds, {problems:,} problems each"
    return [[title, "N", "N+1", "right n+1 commas"],
            *([label, *success(rows, when)] for label, rows, when in main_runs(data))]

def seeds(data, note=""):
    table = [["penalty", "seeds", "N", "N+1", "right n+1 commas", "N / N+1, seed by seed"]]
    for label, rows, when in main_runs(data, note):
        each = ", ".join(both([row], when) for row in by_seed(rows).values())
        table.append([label, len(by_seed(rows)), *success(rows, when), each])
    return table

def commas(data):
    names = [f"{text.replace('line ', 'line').replace(', ', '_')}_n+1_comma" for text in COMMAS]
    return [["", *COMMAS], *([label, *(plain(rows, f"{name} {when}", 1) for name in names)]
                             for label, rows, when in main_runs(data))]

def example(data):
    """What the first command of the README prints, without its last line."""
    row = by_seed(pick(data.runs, mode="critical")).get(0)
    if row is None:
        raise Missing("no run with --mode critical --seed 0")

    def triple(name):
        return [row[name + end] for end in ("", " low", " high")]

    before, after = ({name: triple(f"{name} {when}") for name in ("N", "N+1")}
                     for when in ("before", "after"))
    summary = dict(
        intervals=dict(pretrained_accuracy=before, accuracy=after),
        critical_tokens={"_comma": {when: row[f"commas {when}"] for when in ("before", "after")}},
        seconds=dict(pretrain=row["seconds pretrain"], rl=row["seconds rl"]),
        peak_memory_mb=row["peak MB"])
    cfg = critkl.make_config(dict(mode="critical", test_problems=int(row["test_problems"])))
    lines = critkl.summary_text(summary, cfg).strip().splitlines()
    return "\n".join(["```", *lines[:-1], "```"])

def compare(data, *names, free=()):
    """A row for each value of the settings `names`, N / N+1 of each penalty over the seeds that all
    of the row have. `free`: settings that `names` stands for."""
    trained = [row for row in data.runs if row["iterations"]]
    found = {mode: pick(trained, *names, *free, mode=mode) for mode in PENALTIES}
    if len({tuple(row[name] for name in names) for row in sum(found.values(), [])}) < 2:
        raise Missing(f"no runs with other {' or '.join(names)}")
    table = [[*(name.replace("_", " ") for name in names), "seeds", "pretrained", *PENALTIES,
              "critical less standard at N+1"]]
    keys = {tuple(row[name] for name in names) for mode in PENALTIES for row in found[mode]
            if not set(names) & set(plots.IDLE.get(mode, ()))}
    for key in sorted(keys):
        groups = {}
        for mode, rows in found.items():
            idle = plots.IDLE.get(mode, ())   # has no effect, so these runs count for each value
            groups[mode] = by_seed([row for row in rows if all(
                row[name] == x for name, x in zip(names, key) if name not in idle)])
        shared = set.intersection(*(set(rows) for rows in groups.values() if rows))
        groups = {mode: [rows[seed] for seed in sorted(shared) if rows]
                  for mode, rows in groups.items()}
        rows = sum(groups.values(), [])
        if shared:
            table.append([*(f"{x:g}" if isinstance(x, float) else x for x in key), len(shared),
                          after(rows, "before"), *map(after, groups.values()),
                          less(groups["critical"], groups["standard"])])
    return table

def after(rows, when="after"):
    return f"{mean(rows, f'N {when}')} / {mean(rows, f'N+1 {when}')}" if rows else ""

def less(rows, others):
    return paired(rows, others) if rows and others else ""

def method_list(data):
    """The settings of --method, as Config has them."""
    table = [["`--method`, after [Q] Eq. 23", "mask", "C", "anchor"]]
    for name in critkl.METHODS:
        cfg = critkl.make_config(dict(mode="none", method=name))
        mask = {
            "clip": f"clip {cfg.eps_low:g}, {cfg.eps_high:g}", "none": "none",
            "divergence": f"`--divergence` beyond `--delta` ({cfg.delta:g}; for KL give 0.05)",
            "negative": f"A < 0 and mu - pi >= {cfg.delta:g}"}[cfg.trust_region]
        anchor = "" if cfg.trust_region == "none" else cfg.anchor
        table.append([f"`{name}`", mask, f"{cfg.ratio_cap:g}" if cfg.ratio_cap else "", anchor])
    return table

def methods(data):
    """[Q]: all methods under strain."""
    rows = strained(data)
    table = [["method", "seeds", "reward, first", "reward, last", "less that of `ppo`", "N", "N+1",
              "smallest pi - mu, mean", "masked", "bad updates"]]
    ppo = [row for row in rows if row["region"] == "`ppo`"]
    for method in dict.fromkeys(row["region"] for row in rows):
        group = [row for row in rows if row["region"] == method]
        cells = [mean(group, name) for name in
                 ("reward first", "reward last", "N after", "N+1 after")]
        cells.insert(2, paired(group, ppo, "reward last") if ppo and group[0] not in ppo else "")
        table.append([method, len(by_seed(group)), *cells, mean(group, "drift_min mean", 0),
                      mean(group, "masked mean", 2), mean(group, "bad mean", 3)])
    return table

def strain_crossed(data):
    """[Q]'s strain with and without the critical penalty, over the seeds that a row shares."""
    table = [["trust region", "seeds", *(f"{name}, {penalty}" for name in ("reward", "N", "N+1")
                                         for penalty in ("none", "critical"))]]
    for region in ("`pg_is`", "`ppo`", "`dppo`"):
        groups = [by_seed([row for row in strained(data, penalty) if row["region"] == region])
                  for penalty in ("none", "critical")]
        shared = sorted(groups[0].keys() & groups[1].keys())
        if not shared:
            raise Missing(f"no runs of {region} with --mode critical --fixed")
        cells = [mean([group[seed] for seed in shared], column)
                 for column in ("reward last", "N after", "N+1 after") for group in groups]
        table.append([region, len(shared), *cells])
    return table

def power(data):
    """How many seeds tell 10 points in the last reward, paired, with a power of 80% at 5%."""
    rows = strained(data)
    table = [["compared", "seeds", "reward, last: difference", "spread of it", "N: difference",
              "seeds that tell 10 points of reward"]]
    for first, second in COMPARED:
        groups = [[row for row in rows if row["region"] == name] for name in (first, second)]
        found = differences(*groups, "reward last")
        if len(found) < 2:
            raise Missing(f"less than two seeds of {first} and {second}")
        spread = statistics.stdev(found)
        needed = math.ceil(((1.96 + 0.84) * spread / 10) ** 2 + 1.96 ** 2 / 2)
        table.append([f"{first} less {second}", len(found), plus_minus(found), f"{spread:.1f}",
                      paired(*groups, "N after"), needed])
    return table

def processors(data):
    """The runs of seed 0 on each machine, and with each number of threads."""
    table = [["", "pretrained", "critical", "standard"]]
    found = {mode: [row for row in pick(data.all_runs, "note", mode=mode) if row["seed"] == 0]
             for mode in ("critical", "standard")}
    keys = {(row["note"], row["threads"]) for rows in found.values() for row in rows}
    for key in sorted(keys):
        groups = [[row for row in rows if (row["note"], row["threads"]) == key]
                  for rows in found.values()]
        label = f"{key[0] or 'as it is'}, {WORDS[int(key[1])]} thread{'s' * (key[1] > 1)}"
        table.append([label, three(sum(groups, []), "before"), *map(three, groups)])
    if len(table) < 3:
        raise Missing("no runs with --note or --threads")
    return table

def three(rows, when="after"):
    return " / ".join(plain(rows, f"{x} {when}", 1) for x in ("N", "N+1", "commas")) if rows else ""

def evaluated(data, *vary, **given):
    rows = pick(data.evaluations, *vary, mode="evaluate", **given)
    if not rows:
        raise Missing("no runs with --mode evaluate")
    return rows

def gap(data):
    cells = [["listed tokens (n+1 commas and digits)", "critical", "-0.33, -0.13"],
             ["the commas among them", "critical commas", ""],
             ["other tokens", "non-critical", "0.001, 0.0004 (minimum)"]]
    released = dict(certainty="max_prob", certainty_temperature=4.0)
    table = [["certainty less the mean of the other tokens", "Eq. 2", "released code",
              "[V], N = 3 and N = 7"]]
    for label, name, paper in cells:
        found = [pick(data.evaluations, mode="evaluate", **given) for given in ({}, released)]
        table.append([label, *(with_low_high(rows, f"gap {name}", 3, 1) for rows in found), paper])
    return table

def evidence(data):
    """Gap and critical tokens by definition, of other pretrained models and certainties."""
    names = (*DEGREE, *CERTAINTY)
    rows = evaluated(data, *names)
    names = [name for name in names if len({row[name] for row in rows}) > 1]
    if not names:
        raise Missing("no runs with --mode evaluate and another pretraining or certainty")
    counts = ("uncertain", "uncertain and decisive", "listed and uncertain", "all three",
              "listed and decisive")
    table = [[*(name.replace("_", " ") for name in names), "seeds", "gap, commas", "gap, others",
              *counts]]
    for key in sorted({tuple(row[name] for name in names) for row in rows}):
        group = [row for row in rows if tuple(row[name] for name in names) == key]
        cells = [mean(group, f"gap {name}", 3, 1) for name in ("critical commas", "non-critical")]
        table.append([*(f"{x:g}" if isinstance(x, float) else x for x in key),
                      len(by_seed(group)), *cells, *(mean(group, name, 0, 1) for name in counts)])
    return table

def digits(data):
    """[V] tables 4 and 5."""
    sets = [(kind, name) for kind in ("identical", "varying") for name in critkl.SETS]
    table = [["policy", "answers", *map(", ".join, sets)]]
    found = pick(data.evaluations, "policy", mode="evaluate")
    policies = sorted({row["policy"] for row in found}, key=lambda x: (x != "pretrained", x))
    for policy in policies:
        rows = [row for row in found if row["policy"] == policy]
        for kind in ("sampled", "greedy"):
            table.append([policy, kind, *(mean(rows, f"{lengths} {name} {kind}")
                                          for lengths, name in sets)])
    if len(table) < 2:
        raise Missing("no runs with --mode evaluate")
    return [*table, ["[V], N = 7", "", "98.9", "48.8", "0", "0", "100", "69.0", "0", "0"]]

def speed(data):
    """The main command as a whole process, from measured.json."""
    if "whole process" not in data.measured:
        raise Missing("measured.json has no 'whole process'")
    cfg = critkl.Config()
    table = [["", "whole", f"pretraining, {cfg.pretrain_steps:,} steps",
              f"RL and evaluation, {cfg.iterations} iterations", "peak memory"]]
    newer = {f"{name}, AVX-512": x for name, x in data.measured.get("AVX-512", {}).items()}
    for name, x in (data.measured["whole process"] | newer).items():
        table.append([name, f"{x['seconds'] // 60}:{x['seconds'] % 60:02}", f"{x['pretraining']} s",
                      f"{x['RL and evaluation']} s", f"{x['peak MB']} MB"])
    return table

TABLES = {
    "readme": readme, "example": example, "seeds": seeds, "commas": commas,
    "seeds elsewhere": lambda data: seeds(data, "AVX-512"),
    "alpha": lambda data: compare(data, "alpha"),
    "map": lambda data: compare(data, "iterations", "lr", "alpha"),
    "beta": lambda data: compare(data, "beta"),
    "degrees": lambda data: compare(data, *DEGREE),
    "certainty": lambda data: compare(data, *CERTAINTY),
    "crossed": lambda data: compare(data, "region", free=REGION),
    "strain crossed": strain_crossed, "methods": methods, "power": power,
    "method list": method_list, "processors": processors, "gap": gap, "evidence": evidence,
    "digits": digits, "speed": speed}

def content(name, data):
    """A table made from runs, or one of noted.json."""
    return TABLES[name](data) if name in TABLES else data.noted[name]

# ---- Writing them into the texts.

def markdown(table):
    """Rows of cells, or text as it is."""
    if isinstance(table, str):
        return table
    lines = ["|" + "".join(f" {cell} |" if cell != "" else " |" for cell in row) for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])

MARKED = re.compile(r"<!-- table: (.+) -->\n((?:.+\n)*)")
NUMBER = r"-?\d(?:[\d.,:]*\d)?(?:e-\d+)?|\b(?:" + "|".join(WORDS) + r")\b"
GROUP = rf"((?:{NUMBER})(?:\s+(?:±|/|to)\s+(?:{NUMBER}))*)"

def pattern(words):
    """A sentence as a pattern, with a group for each {}."""
    escaped = [re.sub(r"(\\ )+", r"\\s+", re.escape(part)) for part in words.split("{}")]
    return re.compile(GROUP.join(escaped))

def put(text, words, numbers):
    """(text with these numbers in the sentence, how often it occurs there)."""
    if len(numbers) != words.count("{}"):
        raise ValueError(f"{words!r} has other than {len(numbers)} numbers")

    def replaced(match):
        parts, end = [], match.start()
        for i, new in enumerate(numbers, 1):
            parts += [text[end:match.start(i)], str(new)]
            end = match.end(i)
        return "".join([*parts, text[end:match.end()]])

    return pattern(words).subn(replaced, text)

def wrap(block, width):
    """A paragraph or list, wrapped anew if a line is too long. Code and tables stay."""
    if max(map(len, block.splitlines())) <= width or block.startswith(("`", "|", "<")):
        return block
    items = []
    for item in re.split(r"\n(?=- )", block):
        item = " ".join(item.split())
        item = re.sub(r"(?<=\d) ([/±]) (?=-?\d)", r"~\1~", item)   # these stay together
        items.append(textwrap.fill(
            item, 100, subsequent_indent="  " * item.startswith("- "), break_long_words=False,
            break_on_hyphens=False))
    return re.sub(r"(?<=\d)~([/±])~", r" \1 ", "\n".join(items))

def fill(text, file, data):
    """(text with all tables and numbers, what could not be made)."""
    missing = []

    def table(match):
        name = match[1]
        try:
            return f"<!-- table: {name} -->\n{markdown(content(name, data))}\n"
        except (Missing, KeyError) as error:
            missing.append(f"{file}: table {name}: {error}")
            return match[0]

    text = MARKED.sub(table, text)
    for words, numbers in SENTENCES[file]:
        try:
            filled, found = put(text, words, numbers(data))
        except Missing as error:
            found, filled = pattern(words).subn("", text)[1], text
            missing.append(f"{file}: {words!r}: {error}")
        if found != 1:
            missing.append(f"{file}: {words!r}: occurs {found} times")
        else:
            old, new = text.split("\n\n"), filled.split("\n\n")
            text = "\n\n".join(y if x == y else wrap(y, max(100, *map(len, x.splitlines())))
                               for x, y in zip(old, new, strict=True))
    return text, missing

def uncovered(text, file):
    """The numbers that are in no table, sentence or allowed phrase, with the words before them."""
    text = MARKED.sub("", text)
    for words, _ in SENTENCES[file]:
        text = put(text, words, ["#"] * words.count("{}"))[0]
    text = " ".join(text.split())
    for phrase in ALLOWED:
        text = re.sub(phrase, "#", text)
    return re.findall(r".{0,30}\d[\d.,]*.{0,10}", text)

def main(argv=None):
    parser = argparse.ArgumentParser("tables.py", argparse.SUPPRESS, __doc__.partition("\n")[0])
    parser.add_argument("command", nargs="?", default="write", choices=("write", "check"))
    args = parser.parse_args(argv)
    differ = False
    for file in SENTENCES:
        try:
            text = (ROOT / file).read_text(encoding="utf-8")
            new, missing = fill(text, file, load())
        except (OSError, ValueError) as error:
            parser.error(f"{file}: {error}")
        print(*missing, f"{file}: {'as it is' if new == text else 'differs'}", sep="\n")
        differ |= new != text
        if new != text and args.command == "write":
            (ROOT / file).write_text(new, encoding="utf-8")
            print(f"{file}: written")
    return int(differ and args.command == "check")

if __name__ == "__main__":
    sys.exit(main())
