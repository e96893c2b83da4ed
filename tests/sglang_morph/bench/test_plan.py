import sys
from pathlib import Path

import msgspec
import pytest

from sglang_morph.bench.card import Card, CardError
from sglang_morph.bench.plan import Arm, PlanError, read_plan

MINIMAL = """
name = "p"
model = "m"
[[arms]]
name = "static"
command = "python -m sglang.launch_server"
[[arms]]
name = "morph"
command = "python -m sglang_morph.launch_server --memory-backend=layer_swap"
[[workloads]]
name = "w"
trace = "t.csv"
"""
SWEEP = '[[sweeps]]\nworkload = "w"\nlow = 1\nhigh = 2\n'


def write(tmp_path, text):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return path


def test_paths_start_at_the_plans_folder_and_the_first_arm_is_the_reference(tmp_path):
    plan = read_plan(write(tmp_path, MINIMAL))
    assert plan.model == tmp_path / "m"
    assert plan.workloads[0].trace == tmp_path / "t.csv"
    assert plan.reference_arm == "static"
    assert plan.arm("static").words()[0] == sys.executable


def test_what_an_arm_is_is_read_from_its_command():
    def arm(command):
        return Arm(name="a", command=command)

    assert arm("python x --memory-backend=layer_swap").morphs
    assert arm("python x --memory-backend semi_unified").morphs
    assert not arm("python x --memory-backend static").morphs
    assert not arm("python x").morphs
    assert not arm("python x --load-format dummy").real_weights
    assert arm("python x --quantization fp8").quantized and not arm("python x").quantized
    assert arm("/opt/server x").words()[0] == "/opt/server"


def test_a_part_keeps_the_workloads_named_and_the_arms_that_get_one(tmp_path):
    text = MINIMAL + 'arms = ["static"]\n[[workloads]]\nname = "v"\ntrace = "t.csv"\n'
    plan = read_plan(write(tmp_path, text + '[[sweeps]]\nworkload = "v"\nlow = 1\nhigh = 2\n'))
    assert plan.arms_of("w") == ["static"] and plan.arms_of("v") == ["static", "morph"]
    part = plan.part(["w"])
    assert [w.name for w in part.workloads] == ["w"]
    assert [arm.name for arm in part.arms] == ["static"] and part.sweeps == []
    assert plan.part(["w", "v"]) == msgspec.structs.replace(plan, sweeps=[])
    with pytest.raises(PlanError, match="no workload 'u', but w, v"):
        plan.part(["u"])


def test_arms_and_searches_by_name(tmp_path):
    text = MINIMAL + '[[workloads]]\nname = "v"\ntrace = "t.csv"\n'
    for name in ("w", "v"):
        text += f'[[sweeps]]\nworkload = "{name}"\nlow = 1\nhigh = 2\n'
    plan = read_plan(write(tmp_path, text))
    assert plan.known_arms([]) == ["static", "morph"]
    assert plan.known_arms(["morph"]) == ["morph"]
    with pytest.raises(PlanError, match="no arm 'x', but static, morph"):
        plan.known_arms(["morph", "x"])
    assert [sweep.workload for sweep in plan.searches([])] == ["w", "v"]
    assert plan.searches(["v"]) == plan.sweeps[1:]
    with pytest.raises(PlanError, match="no sweep of a workload 'x', but w, v"):
        plan.searches(["x"])
    with pytest.raises(PlanError, match=r"has no \[\[sweeps\]\]"):
        msgspec.structs.replace(plan, sweeps=[]).searches([])


def test_the_arms_of_a_workload_may_be_searched_apart(tmp_path):
    low = SWEEP + 'arms = ["static"]\n'
    high = low.replace("static", "morph").replace("1", "4").replace("2", "8")
    plan = read_plan(write(tmp_path, MINIMAL + low + high))
    assert [plan.arms_to_search(sweep) for sweep in plan.searches(["w"])] == [["static"], ["morph"]]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('name = "p"', "", "name"),
        ('name = "morph"', 'name = "static"', "two arms are named 'static'"),
        ('name = "p"', 'name = "p"\nreference = "x"', "reference 'x' is none"),
        ('name = "p"', 'name = "p"\nrepetitions = 0', "repetitions"),
        ('name = "p"', 'name = "p"\nspeed = 1', "speed"),
        ('name = "morph"', 'name = "../x"', "name"),
        ('name = "w"', 'name = "a/b"', "name"),
        ('name = "w"', 'name = "w"\narms = ["static", "x"]', "'x', which is none of the arms"),
        ('name = "w"', 'name = "w"\narms = ["static", "static"]', "names an arm twice"),
        ('name = "w"', 'name = "w"\narms = ["morph"]', "leaves out 'static'"),
        ('name = "p"', 'name = "p', "plan.toml"),
        ('name = "morph"', 'name = "morph"\nlevel = 1', "--morph-policy manual"),
        ('name = "morph"', 'name = "morph"\nlevel = -1', "level"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(tmp_path, old, new, reason):
    with pytest.raises(PlanError, match=reason):
        read_plan(write(tmp_path, MINIMAL.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("high = 2", 'high = 2\narms = ["static", "x"]', "sweep of 'w' names 'x', which is none"),
        ('workload = "w"', 'workload = "x"', "a sweep's workload 'x' is none of the plan's"),
        ("low = 1", "low = 2", "from 2 to 2 requests/s has no room"),
        ("high = 2", f"high = 2\n{SWEEP}", "two sweeps are of the workload and arm 'w, morph'"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(tmp_path, old, new, reason):
    with pytest.raises(PlanError, match=reason):
        read_plan(write(tmp_path, MINIMAL + SWEEP.replace(old, new, 1)))


def test_a_missing_plan_is_refused():
    with pytest.raises(PlanError, match="give a plan that can be read"):
        read_plan(Path("nowhere.toml"))


def test_a_smaller_card_gives_weights_and_kv_the_same_bytes():
    card = Card(24.0, 139.0, 0.85)
    flags = card.flags(["python"])
    share = float(flags[flags.index("--mem-fraction-static") + 1])
    assert share * 139.0 == pytest.approx(24 * 0.85, rel=1e-3)
    # What SGLang would choose on the small card, not on the real one.
    assert flags[2:] == ["--chunked-prefill-size", "2048", "--cuda-graph-max-bs-decode", "24"]
    assert "24 GiB card on one of 139 GiB" in card.describe()


def test_an_arms_own_choices_stay_but_not_its_own_memory():
    card = Card(80.0, 139.0, 0.85)
    flags = card.flags(["python", "--chunked-prefill-size=512", "--cuda-graph-max-bs", "8"])
    assert len(flags) == 2
    with pytest.raises(CardError, match="--max-total-tokens"):
        card.flags(["python", "--max-total-tokens", "5"])


def test_a_card_larger_than_the_real_one_is_refused():
    with pytest.raises(CardError, match="smaller --gpu-memory-gib"):
        Card(200.0, 139.0, 0.85)
