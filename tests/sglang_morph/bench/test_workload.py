import msgspec
import pytest

from sglang_morph.bench.prompts import PromptError, PromptMaker, count_tokens, text_tokens
from sglang_morph.bench.traces import TraceRequest
from sglang_morph.bench.workload import WorkloadSpec, make_workload

TOKENS = list(range(5000))
HEADER = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    lines = [f"{i},s{i % 3},0,GPT,{20 + 13 * i},{1 + i},0,log" for i in range(12)]
    path.write_text("\n".join([HEADER, *lines]))
    return path


def test_prompts_have_exactly_the_traced_lengths_also_beyond_the_text(trace):
    spec = WorkloadSpec(name="w", trace=trace)
    workload = make_workload(spec, TOKENS[:50], seed=0)
    assert [len(r.input_ids) for r in workload.requests] == [20 + 13 * i for i in range(12)]
    assert [r.output_tokens for r in workload.requests] == list(range(1, 13))


def test_the_same_plan_twice_gives_the_same_prompts(trace):
    spec = WorkloadSpec(name="w", trace=trace, factor=0.5, scaling="thin")
    once, again = (make_workload(spec, TOKENS, seed=7) for _ in range(2))
    assert once == again and once.digest == again.digest
    assert make_workload(spec, TOKENS, seed=8).digest != once.digest


def test_prompts_start_at_different_places(trace):
    workload = make_workload(WorkloadSpec(name="w", trace=trace), TOKENS, seed=0)
    assert len({r.input_ids[0] for r in workload.requests}) == 12


def test_token_counts_are_scaled_and_cut_and_that_is_counted(trace):
    spec = WorkloadSpec(
        name="w", trace=trace, token_factor=0.1, max_input_tokens=10, max_output_tokens=1
    )
    workload = make_workload(spec, TOKENS, seed=0)
    lengths = [len(r.input_ids) for r in workload.requests]
    assert lengths == [min(10, round(0.1 * (20 + 13 * i))) for i in range(12)]
    assert all(r.output_tokens == 1 for r in workload.requests)
    assert workload.origin["cut_to_limit"] == sum(0.1 * (20 + 13 * i) > 10.5 for i in range(12))


def test_a_wanted_rate_is_reached(trace):
    workload = make_workload(WorkloadSpec(name="w", trace=trace, rate=4.0), TOKENS, seed=0)
    assert workload.rate == pytest.approx(4.0)


def make(sharing, requests, **options):
    return PromptMaker(TOKENS, 1, sharing, **options).make(requests)


def test_a_shared_prefix_is_one_of_its_groups():
    asked = [TraceRequest(0.0, 100, 1) for _ in range(40)]
    prompts = make("prefix", asked, prefix_tokens=30, prefix_groups=3)
    assert len({tuple(p[:30]) for p in prompts}) == 3
    assert len({tuple(p) for p in prompts}) == 40
    assert all(len(p) == 100 for p in prompts)


def test_turns_of_a_session_continue_each_other():
    first, other, second = make(
        "sessions",
        [TraceRequest(0, 50, 1, "a"), TraceRequest(1, 50, 1, "b"), TraceRequest(2, 90, 1, "a")],
    )
    assert second[:50] == first != other
    assert len(second) == 90


def test_equal_blocks_are_equal_text_and_the_rest_is_filled():
    one, two = make(
        "blocks",
        [TraceRequest(0, 1100, 1, blocks=(4, 5)), TraceRequest(1, 600, 1, blocks=(4, 6))],
    )
    assert one[:512] == two[:512]
    assert one[512:600] != two[512:600]
    assert (len(one), len(two)) == (1100, 600)


@pytest.mark.parametrize(("sharing", "what"), [("sessions", "sessions"), ("blocks", "block ids")])
def test_sharing_that_the_trace_does_not_tell_is_refused(sharing, what):
    with pytest.raises(PromptError, match=f"no {what}"):
        make(sharing, [TraceRequest(0, 5, 1)])


def test_a_prefix_needs_a_length():
    with pytest.raises(PromptError, match="prefix_tokens"):
        make("prefix", [])


@pytest.mark.parametrize(
    "fields",
    [
        {"rate": 1.0, "factor": 1.0},
        {"densest": True},
        {"densest": True, "duration_s": 5.0, "start_s": 1.0},
        {"duration_s": 0.0},
        {"token_factor": 0.0},
        {"sharing": "everything"},
        {"unknown": 1},
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(fields, trace):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "w", "trace": trace, **fields}, WorkloadSpec)


def test_the_tokenizer_is_the_models(model, tmp_path):
    ids = text_tokens(model, "the value of an object")
    assert len(ids) == 5 and count_tokens(model, ["the value", "of"]) == 3
    with pytest.raises(PromptError, match=r"has no tokenizer\.json"):
        text_tokens(tmp_path, "text")
