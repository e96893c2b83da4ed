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
    plan = read_plan(write(tmp_path, text + '[sweep]\nworkload = "v"\nlow = 1\nhigh = 2\n'))
    assert plan.arms_of("w") == ["static"] and plan.arms_of("v") == ["static", "morph"]
    part = plan.part(["w"])
    assert [w.name for w in part.workloads] == ["w"]
    assert [arm.name for arm in part.arms] == ["static"] and part.sweep is None
    assert plan.part(["w", "v"]) == msgspec.structs.replace(plan, sweep=None)
    with pytest.raises(PlanError, match="no workload 'u', but w, v"):
        plan.part(["u"])


def test_arms_and_a_search_from_the_command_line(tmp_path):
    plan = read_plan(write(tmp_path, MINIMAL + '[sweep]\nworkload = "w"\nlow = 1\nhigh = 2\n'))
    assert plan.known_arms([]) == ["static", "morph"]
    assert plan.known_arms(["morph"]) == ["morph"]
    with pytest.raises(PlanError, match="no arm 'x', but static, morph"):
        plan.known_arms(["morph", "x"])
    assert plan.search(None, None, None) == plan.sweep
    assert plan.search("w", 0.5, None) == msgspec.structs.replace(plan.sweep, low=0.5)
    with pytest.raises(PlanError, match="'v' is none of the plan's"):
        plan.search("v", None, None)
    with pytest.raises(PlanError, match="from 3 to 2"):
        plan.search(None, 3, None)
    with pytest.raises(PlanError, match=r"has no \[sweep\]"):
        msgspec.structs.replace(plan, sweep=None).search(None, 1, 2)


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


def test_the_arms_of_a_sweep_must_be_the_plans(tmp_path):
    sweep = '[sweep]\nworkload = "w"\nlow = 1\nhigh = 2\narms = ["static", "x"]\n'
    with pytest.raises(PlanError, match="the sweep names 'x', which is none of the arms"):
        read_plan(write(tmp_path, MINIMAL + sweep))


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
