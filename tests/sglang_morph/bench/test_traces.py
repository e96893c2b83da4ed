import gzip

import pytest

from sglang_morph.bench.traces import TraceError, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST_1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_2 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
)


def read(tmp_path, content, name="trace.csv", **options):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_trace(path, **options)


def rows(trace):
    return [(round(r.at_s, 4), r.input_tokens, r.output_tokens) for r in trace.requests]


def test_azure_2023_crlf_and_no_newline_at_the_end(tmp_path):
    trace = read(
        tmp_path,
        f"{AZURE}\r\n2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319600,3180,8",
    )
    assert trace.format == "azure"
    assert rows(trace) == [(0.0, 4808, 10), (0.052, 3180, 8)]


def test_azure_2024_with_zones_gzipped(tmp_path):
    text = f"{AZURE}\n2024-05-14 14:00:00.001172+00:00,1661,80\n2024-05-14 16:00:01+02:00,208,3\n"
    trace = read(tmp_path, gzip.compress(text.encode()), "t.csv.gz")
    assert rows(trace) == [(0.0, 1661, 80), (0.9988, 208, 3)]


def test_burstgpt_without_sessions_counts_failed_requests(tmp_path):
    trace = read(
        tmp_path,
        f"{BURST_1}\n744286,ChatGPT,1623,338,1961,Conversation log\n"
        "744287,ChatGPT,0,0,0,Conversation log\n744290,GPT-4,337,126,463,Conversation log\n",
    )
    assert trace.format == "burstgpt"
    assert rows(trace) == [(0.0, 1623, 338), (4.0, 337, 126)]
    assert trace.skipped == {"zero tokens": 1}
    assert trace.requests[0].session is None


def test_burstgpt_with_sessions(tmp_path):
    trace = read(
        tmp_path, f"{BURST_2}\n5,s1,0.3,GPT-4,7,8,15,API log\n6.5,,0.2,GPT-4,3,4,7,API log\n"
    )
    assert [r.session for r in trace.requests] == ["s1", None]
    assert rows(trace) == [(0.0, 7, 8), (1.5, 3, 4)]


def test_mooncake(tmp_path):
    trace = read(
        tmp_path,
        '{"timestamp": 3052, "input_length": 700, "output_length": 5, "hash_ids": [46, 47]}\n'
        '\n{"timestamp": 4052, "input_length": 70, "output_length": 6, "hash_ids": [46]}',
        "trace.jsonl",
    )
    assert trace.format == "mooncake"
    assert rows(trace) == [(0.0, 700, 5), (1.0, 70, 6)]
    assert trace.requests[0].blocks == (46, 47)


def test_byte_order_mark_and_quoted_fields(tmp_path):
    trace = read(
        tmp_path,
        b"\xef\xbb\xbf"
        + b'"TIMESTAMP",ContextTokens,GeneratedTokens\n"2023-11-16 18:17:03.5","12","3"\n',
    )
    assert rows(trace) == [(0.0, 12, 3)]


def test_unsorted_rows_are_sorted_in_and_counted(tmp_path):
    stamps = ("03", "01", "02")
    trace = read(
        tmp_path, "\n".join([AZURE, *(f"2023-11-16 18:17:{s},1{s},2" for s in stamps)]) + "\n"
    )
    assert rows(trace) == [(0.0, 101, 2), (1.0, 102, 2), (2.0, 103, 2)]
    assert trace.out_of_order == 1


GOOD = "2023-11-16 18:17:01,5,6"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("yesterday,5,6", "'yesterday' is no time stamp"),
        ("2023-11-16 18:17:01,five,6", "invalid literal"),
        ("2023-11-16 18:17:01,5", "2 fields where the header has 3"),
        ("2023-11-16 18:17:01,5,6,7", "4 fields where the header has 3"),
        ("2023-11-16 18:17:01,-5,6", "a token count is negative"),
        ("2023-13-16 18:17:01,5,6", "month"),
    ],
)
def test_a_damaged_row_is_named_by_line_or_counted(tmp_path, row, reason):
    text = f"{AZURE}\n{GOOD}\n\n{row}\n{GOOD}\n"
    with pytest.raises(TraceError, match=f"trace.csv, line 4: .*{reason}"):
        read(tmp_path, text)
    trace = read(tmp_path, text, skip_damaged=True)
    assert len(trace.requests) == 2
    assert trace.skipped == {"damaged": 1}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ("a,b,c\n1,2,3\n", "line 1: unknown columns 'a, b, c'"),
        (f"{AZURE}\n2023-11-16 18:17:01,0,6\n", "no request with tokens"),
        (f"{AZURE}\n{GOOD}\n".encode() + b"2023-11-16 18:17:01,\xff,6\n", "line 3: not UTF-8"),
        (f'{AZURE}\n{GOOD}\n"2023-11-16 18:17:01,5,6\n', "line 3"),
        ('{"timestamp": 1}\n', "line 1: 'input_length' is missing"),
        ('{"timestamp": 1, "input_length": 2.5, "output_length": 1}\n', "must be integers"),
        ('{"timestamp": 1, "input_le\n', "line 1"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, reason):
    with pytest.raises(TraceError, match=reason):
        read(tmp_path, content)


def test_a_missing_file_and_a_broken_archive_are_refused(tmp_path):
    with pytest.raises(TraceError, match="give a file that can be read"):
        read_trace(tmp_path / "nothing.csv")
    with pytest.raises(TraceError, match="give a file that can be read"):
        read(tmp_path, b"no archive", "t.csv.gz")
