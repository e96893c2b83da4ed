import pytest

from sglang_morph.bench.traces import TraceRequest
from sglang_morph.bench.window import WindowError, cut, densest, scale


def requests(*times):
    return [TraceRequest(t, 10 + i, 5) for i, t in enumerate(times)]


TRACE = requests(0.0, 10.0, 20.0, 20.5, 21.0, 40.0)


def test_a_window_by_time_is_half_open_and_counts_from_its_start():
    window = cut(TRACE, 10.0, 10.5)
    assert [r.at_s for r in window.requests] == [0.0, 10.0]
    assert [r.input_tokens for r in window.requests] == [11, 12]
    assert window.rate == pytest.approx(2 / 10.5)


def test_without_a_length_it_goes_to_the_end():
    window = cut(TRACE, 20.0, None)
    assert len(window.requests) == 4
    assert window.duration_s == pytest.approx(20 * (1 + 0.5 / 4))


def test_an_empty_window_is_refused():
    with pytest.raises(WindowError, match="the trace ends at 40 s"):
        cut(TRACE, 50.0, 10.0)


def test_the_densest_window_is_found():
    window = densest(TRACE, 2.0)
    assert window.start_s == 20.0
    assert [r.at_s for r in window.requests] == [0.0, 0.5, 1.0]


def test_stretching_keeps_every_request_and_scales_the_rate():
    window = cut(TRACE, 0.0, 50.0)
    faster = scale(window, 2.0, "stretch", seed=1)
    assert [r.at_s for r in faster.requests] == [0.0, 5.0, 10.0, 10.25, 10.5, 20.0]
    assert faster.rate == pytest.approx(2 * window.rate)


def test_thinning_is_seeded_and_keeps_times():
    window = cut(requests(*range(100)), 0.0, 100.0)
    once, again = (scale(window, 0.25, "thin", seed=3) for _ in range(2))
    other = scale(window, 0.25, "thin", seed=4)
    assert once == again != other
    assert len(once.requests) == 25 and once.duration_s == 100.0
    assert set(once.requests) <= set(window.requests)
    assert [r.at_s for r in once.requests] == sorted(r.at_s for r in once.requests)


@pytest.mark.parametrize(
    ("factor", "scaling", "reason"),
    [(2.0, "thin", "can't raise"), (0.01, "thin", "leaves no request"), (0.0, "stretch", "above")],
)
def test_impossible_scaling_is_refused(factor, scaling, reason):
    with pytest.raises(WindowError, match=reason):
        scale(cut(TRACE, 0.0, 50.0), factor, scaling, seed=0)
