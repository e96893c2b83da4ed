import datetime
import os
import subprocess

from sglang_morph.demo.provenance import provenance


def test_it_names_date_and_hardware():
    origin = provenance("make demo")
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(
        origin.date
    )
    assert origin.command == "make demo"
    assert datetime.timedelta() <= age < datetime.timedelta(minutes=1)
    assert f"{os.cpu_count()} cores" in origin.hardware and "GiB" in origin.hardware


def test_outside_a_checkout_the_commit_is_unknown(monkeypatch):
    def no_git(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    assert provenance("x").commit == "unknown"
