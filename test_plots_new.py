"""Tests of plots.py. Runs are files written here, numbers are worked by hand."""
import asyncio
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import plots

PLOTS = os.path.abspath(plots.__file__)
SETTINGS = dict(
    mode="critical", penalty="critical", preset="laptop", digits=3, extra=1, dial=0.2, mistakes=0.3, width=64,
    pretrain_steps=1600, iterations=40, episodes=64, minibatch=16, lr=3e-4, alpha=2.0, kl_kind="k2",
    beta=150.0, certainty="negentropy", certainty_temperature=0.0, method="ppo", trust_region="clip",
    eps_low=0.2, eps_high=0.2, divergence="binary_tv", delta=0.15, top_k=20, ratio_cap=None,
    anchor="rollout", relax="none", relax_below=0.1, advantage="gae", group=8, sampler_dtype="float32",
    staleness=1, fixed=0, seed=0, out="runs", name="", eval_every=10, eval_problems=200, problem="",
    checkpoint="")
METHODS = dict(
    ppo={}, pg_is=dict(trust_region="none"), cispo=dict(trust_region="none", ratio_cap=3.0),
    grpo_clip_higher=dict(eps_high=0.28), minirl=dict(eps_high=0.28, anchor="recomputed"),
    minirl_tis=dict(eps_high=0.28, anchor="recomputed", ratio_cap=3.0),
    dppo=dict(trust_region="divergence"), negative_only=dict(trust_region="negative", delta=0.5))
NUMBER = itertools.count()


def csv_text(rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[f"{row[name]:.6g}" if name in row else "" for name in names] for row in rows]
    return "\n".join(map(",".join, [names, *lines])) + "\n"


def a_run(root, result=None, rows=None, folder=None, **settings):
    """A run folder with these settings, rows of metrics.csv and what the run wrote at its end."""
    mode = settings.get("mode", "critical")
    if mode in ("none", "standard", "critical"):
        settings["penalty"] = mode
    values = SETTINGS | METHODS[settings.get("method", "ppo")] | settings
    folder = root / (folder or f"{next(NUMBER):04d}")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(settings=values, version="2.0", torch="2")))
    if rows:
        (folder / "metrics.csv").write_text(csv_text(rows))
    if result is not None:
        (folder / plots.RESULT[mode]).write_text(json.dumps(result))
    return folder


def some_rows(last=20, success=0.5):
    comma = {f"line{line}_{operand}_n+1_comma": 0.7 for line in (1, 2, 3) for operand in ("first", "second")}
    return [{"iteration": i, "accuracy_N": 0.9, "accuracy_N+1": success + 0.01 * i, **comma}
            for i in range(0, last + 1, 10)]


def success(n, target):
    return dict(accuracy={"N": n, "N+1": target}, pretrained_accuracy={"N": 0.9, "N+1": 0.5})


def inspection(problem="12+7", text=None, J=None):
    text = text or "\n[1,2] + [7]\n1 9\n"
    J = J or [1 - 0.002 * i for i in range(len(text))]
    pretrained = [[[c, 0.75], ["]", 0.125], ["0", 0.0625], ["1", 0.03], [",", 0.00001]] for c in text]
    policy = [[[c, 0.9], ["<", 0.05], ["0", 0.03], ["1", 0.01], [",", 0.01]] for c in text]
    policy[3] = [["x", 0.6], *policy[3][1:]]
    return dict(problem=problem, text=text, certainty=J, correct=True, weight=[j**150 for j in J],
                pretrained=pretrained, policy=policy)


def evaluation(mean, **more):
    """evaluation.json of a policy with this success at N, a half at N+1, a third at N+2 ..."""
    rows = [{"set": kind, "digits": digits, "sampled": [mean / k, mean / k - 0.01, mean / k + 0.03]}
            for kind in ("identical", "varying") for k, digits in enumerate(("N", "N+1", "N+2", "N+3"), 1)]
    gap = {"critical": [-0.3, -0.4, -0.2], "non-critical": [0.001, 0.0005, 0.0015]}
    return dict(rows=rows, sampler=[[0.5, 0.4]], certainty_gap=gap, definition=dict(uncertain=3)) | more


def planned(root):
    """The groups that each picture is drawn from."""
    return {name: found for name, _, found in plots.plan(plots.read_groups([str(root)]))}


def panels(root, name):
    groups = planned(root)[name]
    return plots.FIGURES[name].make(groups, plots.FIGURES[name].what)


def cells(lines):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]


def draw(folder, *args, out=None, **more):
    """plots.py as a process."""
    command = [sys.executable, PLOTS, str(folder), *args]
    return subprocess.run(command, capture_output=True, text=True, **more)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(plots.STYLE, "savefig.dpi", 20)


# ---- Whatever a folder holds.

STATES = dict(
    whole=None, no_summary="summary.json", no_metrics="metrics.csv",
    empty=("metrics.csv", lambda text: ""),
    header_only=("metrics.csv", lambda text: text.split("\n")[0] + "\n"),
    torn_row=("metrics.csv", lambda text: text[:-40]),
    repeated=("metrics.csv", lambda text: text + text.split("\n")[2] + "\n"),
    fewer_columns=("metrics.csv", lambda text: "iteration,accuracy_N+1\n0,0.1\n10,nan\n20,0.3\n"),
    broken_summary=("summary.json", lambda text: "{"))


def test_plots_survive_every_state_of_a_run_folder(tmp_path):
    """One seed for each state, all in one group, without a display, with a matplotlibrc that asks for LaTeX."""
    for seed, change in enumerate(STATES.values()):
        folder = a_run(tmp_path / "runs", success(0.9, 0.8), some_rows(), seed=seed)
        if isinstance(change, str):
            (folder / change).unlink()
        elif change:
            file = folder / change[0]
            file.write_text(change[1](file.read_text()))
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfont.size: 60\nfigure.autolayout: True\n")
    env = {k: v for k, v in os.environ.items() if k != "DISPLAY"} | {"MATPLOTLIBRC": str(tmp_path)}
    done = draw(tmp_path / "runs", env=env)
    assert done.returncode == 0 and done.stderr == ""
    for name in ("learning_curves.png", "learning_curves.pdf", "critical_tokens.png", "results.md"):
        assert (tmp_path / "runs" / name).stat().st_size > 0
    lines = done.stdout.split("\n")
    for i, state in enumerate(STATES):
        named = any(re.search(rf"runs/0*{i}\b|/\d+", line) and f"{i:04d}" in line for line in lines)
        assert named or state in ("whole", "no_metrics", "repeated", "fewer_columns")


def test_mistakes_are_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    run = a_run(tmp_path / "runs", success(0.9, 0.8), some_rows())
    wrong = [[str(tmp_path / "nowhere")], [str(tmp_path / "file")], [], ["--colour"], [str(run), "--ou", "x"],
             [str(run), "--out", str(tmp_path / "file")], [str(run), "--where", "lr"],
             [str(run), "--where", "lr=7"], [str(run), "--where", "speed=7"], [str(run), "--out", "/dev/null/x"]]
    (tmp_path / "empty").mkdir()
    for args in [*wrong, [str(tmp_path / "empty")]]:
        assert plots.main(args) == 2, args
        assert capsys.readouterr().err.count("\n") == 1
    assert not list((tmp_path / "empty").iterdir())


def test_links_are_followed_and_circles_end(tmp_path, capsys):
    outside = a_run(tmp_path / "elsewhere", success(0.9, 0.8), some_rows(), seed=0)
    a_run(tmp_path / "deep" / "er", success(0.9, 0.8), some_rows(), seed=1)
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "linked").symlink_to(outside, target_is_directory=True)
    (runs / "again").symlink_to(outside, target_is_directory=True)
    (runs / "deep").symlink_to(tmp_path / "deep", target_is_directory=True)
    (runs / "circle").symlink_to(runs, target_is_directory=True)
    (tmp_path / "deep" / "circle").symlink_to(tmp_path / "deep", target_is_directory=True)
    (runs / "lost").symlink_to(tmp_path / "nowhere")
    group, = plots.read_groups([str(runs)])
    assert sorted(run.settings["seed"] for run in group.runs) == [0, 1]
    assert re.fullmatch(r".*lost: left out.*\n", capsys.readouterr().out)
    (tmp_path / "alias").symlink_to(outside, target_is_directory=True)
    assert len(plots.read_groups([str(tmp_path / "alias")])) == 1


DAMAGED = [
    ("metrics.csv", b"\xff\x00,1\n" + bytes(range(256))), ("metrics.csv", b"iteration,accuracy_N\n0,0.5,7\n"),
    ("metrics.csv", b"iteration,accuracy_N\n0,#DIV/0!\n"), ("metrics.csv", b"step,accuracy_N\n0,0.5\n"),
    ("summary.json", b""), ("summary.json", b'{"accuracy": {"N": 0.9'), ("summary.json", b"[1]"),
    ("summary.json", b"\xff\xfe"), ("summary.json", b'{"accuracy": {"N": NaN}}'), ("summary.json", b"[" * 100000),
    ("summary.json", b'{"accuracy": [0.5]}'), ("summary.json", b'{"accuracy": {"N": "x"}}'),
    ("config.json", b"[" * 100000), ("config.json", b"{}"), ("config.json", b'{"settings": {"mode": []}}'),
    ("config.json", b'{"settings": {"mode": "critical", "seed": {}}}'), ("config.json", b""),
    ("config.json", b'{"settings": {"mode": "dance"}}'), ("config.json", b"9" * 5000)]


@pytest.mark.parametrize("name, content", DAMAGED)
def test_damaged_files_are_named(tmp_path, name, content, capsys):
    """Each in one line that names the folder; what the others hold is drawn."""
    a_run(tmp_path, success(0.9, 0.8), some_rows(), seed=0)
    folder = a_run(tmp_path, success(0.9, 0.8), some_rows(), seed=1)
    (folder / name).write_bytes(content)
    group, = plots.read_groups([str(tmp_path)])
    said = [line for line in capsys.readouterr().out.split("\n") if "left out" in line]
    assert len(said) == 1 and str(folder) in said[0]
    assert len(group.runs) == (1 if name == "config.json" else 2)
    assert len(group.final()) == (2 if name == "metrics.csv" else 1)


ALIEN = [[], 3, {"rows": 5, "sampler": {}, "certainty": 1, "phases": []}, {"text": "ab", "certainty": [None, "x"]},
         {"rows": [1, {"set": [], "digits": {}}], "sampler": [[]], "phases": {"a": 1, "b": {"seconds": "x"}}},
         {"text": 5, "definition": {"a": {"b": 1}}, "certainty_gap": {"critical": None}, "accuracy": [1]}]


@pytest.mark.parametrize("alien", ALIEN)
def test_results_of_other_programs(tmp_path, alien, capsys):
    for mode in ("critical", "evaluate", "inspect", "bench"):
        a_run(tmp_path, alien, mode=mode)
    for settings in (dict(digits="x", extra=None, alpha="y", seed="z"), dict(alpha=10**400, lr=True)):
        a_run(tmp_path, success(0.9, 0.8), some_rows(), **settings)
    groups = plots.read_groups([str(tmp_path)])
    assert capsys.readouterr().out.count("left out") == 4
    for _, picture, found in plots.plan(groups):
        assert picture.make(found, picture.what)


def test_a_pipe_and_odd_results_do_not_stop_it(tmp_path, capsys):
    folder = a_run(tmp_path, None, some_rows())
    os.mkfifo(folder / "summary.json")
    answer = inspection()
    del answer["weight"]
    short = inspection() | {"certainty": [0.5]}
    for end in (answer, short, inspection(J=[math.nan] * 17)):
        a_run(tmp_path, end, mode="inspect")
    groups = plots.read_groups([str(tmp_path)])
    assert len([line for line in capsys.readouterr().out.split("\n") if ".json: left out" in line]) == 4
    assert plots.answers(groups) == ""


SHEETS = dict(
    mark=lambda text: "\ufeff" + text, dos=lambda text: text.replace("\n", "\r\n"),
    semicolons=lambda text: "\ufeff" + text.replace(",", ";").replace(".", ",").replace("\n", "\r\n"),
    tabs=lambda text: text.replace(",", "\t"), empty_lines=lambda text: text + ",,,,,,,,\n\n",
    quoted=lambda text: "\n".join(",".join(f'"{x}"' for x in line.split(",")) for line in text.split("\n")[:-1]),
    cut=lambda text: text[:-1])


@pytest.mark.parametrize("change", SHEETS.values(), ids=SHEETS)
def test_metrics_saved_by_a_spreadsheet(change):
    text = csv_text(some_rows())
    assert plots.parse_metrics(change(text).removeprefix("\ufeff")) == plots.parse_metrics(text)


def test_a_byte_order_mark_is_read(tmp_path, capsys):
    for seed in (0, 1):
        folder = a_run(tmp_path, None, some_rows(), seed=seed)
    for file in folder.iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    group, = plots.read_groups([str(tmp_path)])
    assert [len(run.rows) for run in group.runs] == [3, 3]


# ---- The process.

@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run of which nothing is drawn but the tables, in a folder with a name that few encodings have."""
    root = tmp_path_factory.mktemp("żółw $x$")
    a_run(root, dict(phases={"update": dict(seconds=1.0)}), mode="bench", folder="żółw")
    (root / "żółw" / "metrics.csv").write_text("x")
    return root


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_output_that_cannot_show_a_name(small, tmp_path, encoding):
    done = draw(small, "--out", str(tmp_path), env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "results.md").exists()


@pytest.mark.parametrize("output", [">&-", "| head -n 1", "> /dev/full"])
def test_output_that_is_closed(small, tmp_path, output):
    command = f"set -o pipefail; '{sys.executable}' '{PLOTS}' '{small}' --out '{tmp_path}' {output}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "results.md").exists()


TELL = """
import runpy, signal, sys
set_handler = signal.signal
def tell(*args):
    set_handler(*args)
    print("ready", flush=True)
signal.signal = tell
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("delay", [0, 0.2, 0.8])
def test_ctrl_c_at_any_moment(small, tmp_path, delay):
    """130 and nothing else, from the first statement on."""
    command = [sys.executable, "-c", TELL, PLOTS, *[str(small)] * 99, "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, "")


def test_ctrl_c_in_a_program_that_calls_main(monkeypatch, small):
    def interrupt(argv):
        raise KeyboardInterrupt
    monkeypatch.setattr(plots, "run", interrupt)
    assert plots.main([str(small)]) == 130


def test_the_users_style_comes_back(small, tmp_path, quick):
    with plots.matplotlib.rc_context({"font.size": 33}):
        assert plots.main([str(small), "--out", str(tmp_path)]) == 0
        assert plots.matplotlib.rcParams["font.size"] == 33


# ---- What is compared.

def test_runs_that_differ_in_the_seed_alone_are_a_group(tmp_path, capsys):
    for seed in range(2):
        a_run(tmp_path, mode="none", seed=seed, alpha=7.0, beta=9.0, delta=0.3, relax_below=0.2, name=f"n{seed}")
        a_run(tmp_path, mode="none", seed=seed, method="dppo", eps_low=0.1)
        a_run(tmp_path, mode="standard", seed=seed, beta=10.0 * seed)
        a_run(tmp_path, mode="critical", seed=seed, beta=10.0 + seed)
    groups = plots.read_groups([str(tmp_path)])
    assert sorted((g.key["penalty"], len(g.runs)) for g in groups) == [
        ("critical", 1), ("critical", 1), ("none", 2), ("none", 2), ("standard", 2)]
    twin = a_run(tmp_path, success(0.9, 0.8), mode="standard", seed=0)
    capsys.readouterr()
    plots.read_groups([str(tmp_path)])
    assert f"left out, it has the settings and the seed of {twin}" in capsys.readouterr().out


def test_the_first_picture_shows_one_group_of_each_penalty(tmp_path, capsys):
    """That with the most runs, then with the most common settings; other sets are told of."""
    for seed in range(2):
        for mode in ("none", "standard", "critical"):
            a_run(tmp_path, None, some_rows(), mode=mode, seed=seed)
        a_run(tmp_path, None, some_rows(), mode="standard", alpha=0.02, seed=seed)
        a_run(tmp_path, None, some_rows(), mode="critical", alpha=0.02, beta=10.0, seed=seed)
        a_run(tmp_path, None, some_rows(), mode="critical", beta=500.0, seed=seed)
    a_run(tmp_path, None, some_rows(), mode="critical", lr=1e-3)
    found = planned(tmp_path)["learning_curves"]
    assert [(g.key["penalty"], g.key.get("alpha"), g.key["lr"]) for g in found] == [
        ("none", None, 3e-4), ("standard", 2.0, 3e-4), ("critical", 2.0, 3e-4)]
    assert "learning_curves: 1 more can be chosen by --where lr" in capsys.readouterr().out
    assert plots.labels(found) == ["none", "standard", "critical"]
    for seed in (2, 3):
        a_run(tmp_path, None, some_rows(), mode="standard", alpha=0.02, seed=seed)
    assert plots.labels(planned(tmp_path)["learning_curves"]) == ["none", "standard, alpha 0.02", "critical, alpha 2"]


def test_where_chooses(tmp_path):
    for lr, count in ((1e-3, 1), (3e-4, 2)):
        for seed in range(count):
            a_run(tmp_path, None, some_rows(), lr=lr, seed=seed)
    a_run(tmp_path, None, some_rows(), mode="none")
    for where, count in (([], 3), ([("lr", "0.001")], 1), ([("alpha", "2")], 3), ([("beta", "9")], 1)):
        assert len(plots.read_groups([str(tmp_path)], where)) == count


def test_degrees_of_pretraining(tmp_path):
    for mistakes in (0.1, 0.3, 0.5):
        a_run(tmp_path, None, some_rows(), mistakes=mistakes)
    a_run(tmp_path, None, some_rows(), mistakes=0.2, alpha=0.5)
    found = planned(tmp_path)["pretraining"]
    assert plots.labels(found) == ["mistakes 0.1", "mistakes 0.3", "mistakes 0.5"]


def test_methods_and_their_variants(tmp_path):
    for method in METHODS:
        a_run(tmp_path, None, some_rows(), mode="none", method=method)
    for relax in ("low", "high", "both"):
        a_run(tmp_path, None, some_rows(), mode="none", relax=relax)
    pictures = planned(tmp_path)
    assert sorted(plots.labels(pictures["trust_region"])) == sorted(METHODS)
    assert plots.labels(pictures["variants"]) == ["relax both", "relax high", "relax low", "relax none"]
    styles = plots.styles(pictures["trust_region"])
    assert len({(str(s["color"]), s["linestyle"], s["marker"]) for s in styles}) == 8


def test_a_mean_never_changes_its_seeds(tmp_path, capsys):
    """A good seed that stops early: the curve ends there, and where not all were evaluated it has no point."""
    for seed, every, last in ((0, 10, 40), (1, 20, 40), (2, 20, 20)):
        rows = [dict(iteration=i, accuracy_N=0.2 * seed) for i in range(0, last + 1, every)]
        a_run(tmp_path, None, rows, seed=seed)
    a_run(tmp_path, None, None, seed=3)
    odd = a_run(tmp_path, None, [dict(iteration=0, reward=0.5)], seed=4)
    group, = plots.read_groups([str(tmp_path)])
    x, y = group.curve("accuracy_N")
    assert f"{odd}: left out of a curve, it has no accuracy_N\n" in capsys.readouterr().out
    half = 4.303 * 20 / math.sqrt(3)
    assert x == [0, 20] and np.array(y) == pytest.approx(np.array([[20, half, half]] * 2))


def test_the_first_picture_by_hand(tmp_path):
    """Three panels; the third is the mean over the listed n+1 commas, and nothing else."""
    rows = [{"iteration": 0, "accuracy_N": 0.9, "accuracy_N+1": 0.4, "line1_first_n+1_comma": 0.5,
             "line3_second_n+1_comma": 0.7, "line1_first_n+1_digit": 0.1, "line1_first_n+2_comma": 0.1}]
    a_run(tmp_path, None, rows)
    found = panels(tmp_path, "learning_curves")
    assert [panel.lines[0][3][0][0] for panel in found] == pytest.approx([40, 90, 60])
    axes = plots.draw(found).axes
    assert [a.get_ylim() for a in axes] == [(0, 100)] * 3
    assert [panel.lines[0][3] for panel in panels(tmp_path, "critical_tokens")][1] == []


def test_trust_region_in_numbers(tmp_path):
    rows = [dict(iteration=0), dict(iteration=10, reward=0.5, drift_max=0.2, masked=0.01, drift=0.002),
            dict(iteration=20, reward=0.7, drift_max=0.4, masked=0.03, drift=-0.004)]
    for method in ("ppo", "dppo"):
        a_run(tmp_path, None, rows, mode="none", method=method)
    found = panels(tmp_path, "trust_region")
    assert cells(plots.numbers("x", found))[1] == [
        "ppo (1 seed)", "", "50.0 → 70.0", "1.0 → 3.0", "0.2000 → -0.4000", "20.0 → 40.0", ""]


def test_best_against_best_by_hand(tmp_path):
    """Standard is best at alpha 0.5 (70, 74), critical at 2 (80, 90): ahead by 10 and 16 on these seeds."""
    for mode, alpha, target in (("standard", 0.5, (0.70, 0.74)), ("standard", 2.0, (0.60, 0.60)),
                                ("critical", 0.5, (0.75, 0.75)), ("critical", 2.0, (0.80, 0.90))):
        for seed in (0, 1):
            a_run(tmp_path, success(0.97, target[seed]), mode=mode, alpha=alpha, seed=seed)
    found = planned(tmp_path)["frontier"]
    rows = cells(plots.best_against_best(found))
    assert [row[:2] + row[3:4] for row in rows] == [["standard", "2", "2"], ["critical", "2", "2"]]
    assert [row[2].split(",")[0] for row in rows] == ["alpha 0.5", "alpha 2"]
    assert rows[1][4].startswith("85.0") and rows[1][6] == f"13.0 ± {12.706 * 3:.1f}"
    axes = plots.frontier(found, ()).axes[0]
    rings = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [line.get_ydata()[0] for line in rings] == pytest.approx([72, 85])
    assert axes.get_xlim()[1] == axes.get_ylim()[1] == 100


@pytest.mark.parametrize("crowd", [False, True])
def test_frontier_labels_cover_nothing(tmp_path, crowd):
    """Labels stay inside, apart from each other and off the points; also where all points lie together."""
    for i, alpha in enumerate((0.002, 0.02, 0.2, 0.5, 2.0, 20.0)):
        for lr in (1e-4, 3e-4, 1e-3):
            for mode in ("standard", "critical"):
                n, target = (0.98, 0.95) if crowd else (0.9 + 0.015 * i + lr, 0.98 - 0.02 * i * (mode == "standard"))
                a_run(tmp_path, success(n + 1e-4 * i, target - 1e-4 * i), mode=mode, alpha=alpha, lr=lr)
    with plots.matplotlib.rc_context(plots.STYLE):
        figure = plots.frontier(planned(tmp_path)["frontier"], ())
        figure.draw_without_rendering()
        axes = figure.axes[0]
        boxes = [text.get_window_extent() for text in axes.texts]
        points = np.concatenate([axes.transData.transform(line.get_xydata()) for line in axes.lines])
    assert crowd or len(boxes) > 4
    for i, box in enumerate(boxes):
        assert not box.count_overlaps(boxes[:i])
        assert not any(box.contains(*point) for point in points)
        assert axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)


def test_sweeps_by_hand(tmp_path):
    """No penalty is alpha 0, the standard penalty beta 0; each budget has its panels."""
    a_run(tmp_path, success(0.9, 0.3), mode="none")
    for alpha in (0.5, 2.0):
        a_run(tmp_path, success(0.9, alpha / 10), mode="standard", alpha=alpha)
        a_run(tmp_path, success(0.9, alpha / 5), mode="critical", alpha=alpha)
    a_run(tmp_path, success(0.9, 0.6), mode="critical", beta=1000.0)
    beta, _ = panels(tmp_path, "beta_sweep")
    assert beta.ticks == ["0", "150", "1000"]
    assert [[mean for mean, _, _ in line[3]] for line in beta.lines] == [pytest.approx([20]), pytest.approx([40, 60])]
    alpha, _ = panels(tmp_path, "alpha_sweep")
    assert alpha.ticks == ["0", "0.5", "2"] and [line[0] for line in alpha.lines] == ["none", "standard", "critical"]
    assert np.round([line[2][0] for line in alpha.lines]).tolist() == [0, 1, 1]
    rows = cells(plots.numbers("x", [alpha]))
    assert rows == [["none", "0", "30.0"], ["standard", "0.5", "5.0"], ["standard", "2", "20.0"],
                    ["critical", "0.5", "10.0"], ["critical", "2", "40.0"]]
    a_run(tmp_path, success(0.9, 0.7), mode="critical", lr=1e-3)
    assert [panel.title for panel in panels(tmp_path, "alpha_sweep")][:2] == [
        "success at N+1, %\niterations 40, lr 0.0003", "success at N+1, %\niterations 40, lr 0.001"]


def test_penalties_crossed_with_trust_regions(tmp_path):
    value = {}
    for i, penalty in enumerate(("none", "standard", "critical")):
        for j, method in enumerate(("ppo", "pg_is", "dppo")):
            value[penalty, method] = 0.1 + 0.3 * i + 0.1 * j
            a_run(tmp_path, success(0.9, value[penalty, method]), mode=penalty, method=method)
    rows = cells(plots.numbers("x", panels(tmp_path, "crossed")))
    assert len(rows) == 9
    for penalty, method, target, _ in rows:
        assert target == f"{100 * value[penalty, method.replace(chr(92), '')]:.1f}"


def test_evaluations(tmp_path):
    """Two seeds: mean and Student's interval over them. One seed: the interval that it came with."""
    for seed, mean in ((0, 0.8), (1, 0.9)):
        a_run(tmp_path, evaluation(mean, definition=dict(uncertain=3 + seed)), mode="evaluate", seed=seed)
    a_run(tmp_path, evaluation(0.6), mode="evaluate", checkpoint="runs/critical-1234-seed7")
    rows = cells(plots.numbers("x", panels(tmp_path, "accuracy_by_digits")))
    rows = {(row[0], row[1]): row[3] for row in rows}
    assert rows["pretrained", "N"] == f"85.0 ± {12.706 * 5:.1f}"
    assert rows["critical-1234", "N"] == "60.0 (59.0 to 63.0)"
    assert rows["critical-1234", "N+1"] == "30.0 (29.0 to 33.0)"
    table = cells(plots.definition(plots.read_groups([str(tmp_path)])))
    assert table[0][:2] == ["certainty\\_gap", "critical"] and table[2][1] == "uncertain"
    assert [row[3] for row in table] == ["-0.3 ± 0", "0.001 ± 0", "3.5 ± 6.4"]
    assert [row[2] for row in table][:1] == ["-0.3 ± 0.1"]


def test_mismatch(tmp_path):
    pairs = [[0.5, 0.4], [0.1, 0.2], [0.0, 0.5], [1]]
    a_run(tmp_path, evaluation(0.9, sampler=pairs), mode="evaluate")
    left, right = panels(tmp_path, "mismatch").axes
    assert left.lines[0].get_ydata().tolist() == pytest.approx([0.8, 2.0])
    assert right.lines[0].get_ydata().tolist() == pytest.approx([0.1, 0.1])


def test_growth(tmp_path):
    for digits in (2, 4, 8):
        phases = {"update": dict(seconds=digits**2, peak_memory_mb=100 * digits)}
        a_run(tmp_path, dict(phases=phases), mode="bench", digits=digits)
    for episodes in (32, 128):
        phases = {"update": dict(seconds=episodes, peak_memory_mb=None)}
        a_run(tmp_path, dict(phases=phases), mode="bench", episodes=episodes, minibatch=episodes // 4)
    found = panels(tmp_path, "growth")
    assert [panel.title for panel in found][:3:2] == ["time, s, by digits", "memory, MB, by digits"]
    assert found[0].lines[0][2] == [2, 4, 8] and [y[0] for y in found[0].lines[0][3]] == [4, 16, 64]
    assert len(plots.draw(found).axes) == 4


def test_coloured_text(tmp_path):
    """Each character stands in its line and column over its certainty; the least certain are framed."""
    end = inspection()
    a_run(tmp_path, end, mode="inspect")
    axes = panels(tmp_path, "coloured_text").axes[0]
    shown = {(t.get_position()[1], t.get_position()[0]): t for t in axes.texts}
    image, place = axes.images[0].get_array(), 0
    for y, line in enumerate(end["text"].split("\n")[:-1]):
        for x, character in enumerate(line + "↵"):
            assert shown[y, x].get_text() == character and image[y, x] == pytest.approx(end["certainty"][place])
            assert (shown[y, x].get_bbox_patch() is not None) == (place >= len(end["text"]) - 5)
            place += 1
    assert place == len(end["text"]) == len(shown)


def test_a_very_long_answer_is_cut_with_a_note(tmp_path):
    a_run(tmp_path, inspection(text="ab\n" * 3000), mode="inspect")
    axes = panels(tmp_path, "coloured_text").axes[0]
    assert "the first 60 of 3000 lines" in axes.get_title() and len(axes.texts) == 180


def inside(figure):
    """Titles, labels and legends are within the picture."""
    figure.draw_without_rendering()
    texts = [a for axes in figure.axes for a in (axes.title, axes.xaxis.label, axes.yaxis.label)]
    boxes = [artist.get_window_extent() for artist in [*texts, *figure.legends]]
    edge = figure.bbox
    return all(edge.x0 - 1 <= box.x0 and box.x1 <= edge.x1 + 1 and edge.y0 - 1 <= box.y0 and box.y1 <= edge.y1 + 1
               for box in boxes if box.width)


def test_long_and_odd_names_stay_inside(tmp_path):
    long = "$x_{" + "m" * 236
    a, b = "9" * 30, "8" * 30
    text = f"\n[{','.join(a)}] + [{','.join(b)}]\n"
    a_run(tmp_path, inspection(f"{a}+{b}", text), mode="inspect", problem=f"{a}+{b}", checkpoint=long)
    for seed in (0, 1):
        a_run(tmp_path, evaluation(0.9), mode="evaluate", checkpoint=f"runs/{long}-seed{seed}", seed=seed)
        a_run(tmp_path, evaluation(0.9), mode="evaluate", checkpoint=f"runs/{long}$|`<b>-seed{seed}", seed=seed)
    for mode in ("none", "standard", "critical"):
        a_run(tmp_path, success(0.9, 0.8), some_rows(), mode=mode)
        a_run(tmp_path, success(0.9, 0.8), some_rows(), mode=mode, sampler_dtype=long)
    with plots.matplotlib.rc_context(plots.STYLE):
        for name, picture, groups in plots.plan(plots.read_groups([str(tmp_path)])):
            figure = picture.make(groups, picture.what)
            assert inside(plots.draw(figure) if isinstance(figure, list) else figure), name
    assert "\\$x\\_{mm" in "".join(plots.definition(plots.read_groups([str(tmp_path)])))
    assert plots.markdown("a|`<b>$x_1$\nc") == "a\\|\\`\\<b>\\$x\\_1\\$ c"


def test_what_is_missing_is_named(tmp_path, capsys, quick):
    a_run(tmp_path, success(0.9, 0.6), some_rows())
    assert plots.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    drawn = {"learning_curves", "critical_tokens"}
    for name in plots.FIGURES:
        assert (f"{name}: not drawn, needs" in text) == (name not in drawn)
        assert (tmp_path / "out" / f"{name}.pdf").exists() == (tmp_path / "out" / f"{name}.png").exists() == (name in drawn)
    row, = cells((tmp_path / "out" / "results.md").read_text().split("## learning")[0].split("\n"))
    assert row == ["1 of 1", "90.0", "90.0", "50.0", "60.0", ""]


def test_statistics():
    """Student's t by hand; the interval of one seed is its own; nothing is nan by mistake."""
    assert plots.interval([1.0, 3.0]) == (2.0, pytest.approx(12.706), pytest.approx(12.706))
    assert plots.interval([[0.5, 0.4, 0.7]]) == pytest.approx((0.5, 0.1, 0.2))
    assert plots.interval([[0.5, 0.4, 0.7], [0.7, 0.1, 0.9]])[0] == pytest.approx(0.6)
    assert all(map(math.isnan, plots.interval([[], None, math.nan])))
    nine = plots.interval([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert nine[:2] == pytest.approx((5, 2.306 * math.sqrt(7.5) / 3))
    assert plots.interval(list(range(31)))[1] == pytest.approx(2.0423 * math.sqrt(2480 / 30 / 31), rel=2e-3)
    texts = [plots.cell(x) for x in ((50, 1, 1), (50, 1, 2), (0.01, 0.002, 0.002), (math.nan,) * 3)]
    assert texts == ["50.0 ± 1.0", "50.0 (49.0 to 52.0)", "0.0100 ± 0.0020", ""]


# ---- answers.html

def page_of(root, **more):
    a_run(root, inspection("12+7") | more, mode="inspect")
    a_run(root, inspection("12+7") | more, mode="inspect", checkpoint="runs/critical-12-seed0")
    a_run(root, inspection("<script>alert(1)</script>") | more, mode="inspect", checkpoint="runs/none-1-seed0")
    return plots.answers(plots.read_groups([str(root)]))


def test_the_page_of_answers_is_self_contained(tmp_path):
    page = page_of(tmp_path)
    assert not re.search(r"https?:|src=|@import|url\(|<link", page) and page.count("<script>") == 1
    data = json.loads(re.search(r"const answers = (.*);\n", page).group(1))
    assert [answer["title"] for answer in data] == [
        "pretrained, seed 0: right", "critical-12, seed 0: right", "none-1, seed 0: right"]
    assert data[1]["certainty"] == inspection()["certainty"]


class Browser:
    """A headless Chromium, spoken to by its debugging protocol."""
    def __init__(self, socket):
        self.socket, self.ids, self.events = socket, itertools.count(1), []

    async def call(self, method, **params):
        number = next(self.ids)
        await self.socket.write_message(json.dumps(dict(id=number, method=method, params=params)))
        while True:
            message = json.loads(await asyncio.wait_for(self.socket.read_message(), 30))
            if message.get("id") == number:
                return message["result"]
            self.events.append(message["method"])

    async def value(self, expression):
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    async def key(self, key):
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=9 * (key == "Tab"))

    async def point(self, name):
        x, y = await self.value(f"(r => [r.x + r.width / 2, r.y + r.height / 2])(document.getElementById('{name}')"
                                ".getBoundingClientRect())")
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return await self.value("about.hidden ? '' : about.innerText")


async def visit(page, port, shots):
    from tornado.httpclient import AsyncHTTPClient
    from tornado.websocket import websocket_connect
    for _ in range(100):
        try:
            found = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json/list")
            break
        except OSError:
            await asyncio.sleep(0.1)
    target = next(t for t in json.loads(found.body) if t["type"] == "page")
    browser = Browser(await websocket_connect(target["webSocketDebuggerUrl"], max_message_size=2**26))
    for domain in ("Runtime", "Log", "Page", "Network"):
        await browser.call(f"{domain}.enable")
    seen = {}
    for look, width, scheme in (("light", 1000, "light"), ("dark", 1000, "dark"), ("phone", 390, "light")):
        await browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1,
                           mobile=look == "phone")
        await browser.call("Emulation.setEmulatedMedia", features=[dict(name="prefers-color-scheme", value=scheme)])
        await browser.call("Page.navigate", url=page.as_uri())
        while await browser.value("document.readyState + (document.querySelectorAll('pre').length == 3)") != "completetrue":
            await asyncio.sleep(0.05)
        seen[look, "hover"] = await browser.point("1-3")
        seen[look, "colours"] = await browser.value("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
        seen[look, "wide"] = await browser.value("document.documentElement.scrollWidth")
        seen[look, "box"] = await browser.value("(r => [r.left, r.top, r.right, r.bottom])(about.getBoundingClientRect())")
        if shots:
            import base64
            shot = await browser.call("Page.captureScreenshot")
            pathlib.Path(shots, look + ".png").write_bytes(base64.b64decode(shot["data"]))
    await browser.key("Escape")
    seen["escape"] = await browser.value("about.hidden")
    for key in ("Tab", "ArrowRight", "ArrowRight", "ArrowDown"):
        await browser.key(key)
    seen["keys"] = await browser.value("document.activeElement.id + ' ' + about.innerText.split('\\n')[0]")
    seen["changed"] = await browser.value("[...document.querySelectorAll('pre .changed')].map(s => s.id)")
    seen["errors"] = [e for e in browser.events if e in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")]
    await browser.call("Browser.close")
    return seen


def test_the_page_of_answers_in_a_browser(tmp_path):
    """Hovering and keys show the numbers of the file; no errors; legible in light, dark and on a phone."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not chromium:
        pytest.skip("no Chromium here: answers.html is not tried in a browser")
    pytest.importorskip("tornado")
    page = tmp_path / "answers.html"
    page.write_text(page_of(tmp_path / "runs"), encoding="utf-8")
    profile = tmp_path / "profile"
    process = subprocess.Popen(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = profile / "DevToolsActivePort"
        for _ in range(300):
            if port.exists() and port.read_text():
                break
            time.sleep(0.1)
        seen = asyncio.run(visit(page, int(port.read_text().split()[0]), os.environ.get("SHOTS")))
        process.wait(20)
    finally:
        process.kill()
    J = inspection()["certainty"][3]
    assert seen["errors"] == [] and seen["escape"] is True and seen["changed"] == ["0-3", "1-3", "2-3"]
    for look in ("light", "dark", "phone"):
        lines = [line.split("\t") for line in seen[look, "hover"].split("\n") if line.strip()]
        assert lines[0] == [","] and lines[1] == [f"J = {J:.4f}, J^β = {J**150:.4f}"]
        assert [line for line in lines if len(line) == 4][-5:] == [
            [",", "75.00%", "x", "60.00%"], ["]", "12.50%", "<", "5.00%"], ["0", "6.25%", "0", "3.00%"],
            ["1", "3.00%", "1", "1.00%"], [",", "1.0e-3%", ",", "1.00%"]]
        width = 390 if look == "phone" else 1000
        left, top, right, bottom = seen[look, "box"]
        assert seen[look, "wide"] <= width and 0 <= left and right <= width and 0 <= top and bottom <= 800
    assert seen["light", "colours"] != seen["dark", "colours"]
    assert seen["keys"] == "0-14 ␣ space"
