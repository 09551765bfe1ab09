"""Commands for running engines: which are meant, what is refused, and what is said."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvoffload_patch import _bootstrap
from kvoffload_patch.cli import engines, main, report, top
from kvoffload_patch.control import client
from kvoffload_patch.control.commands import Command
from kvoffload_patch.control.errors import Refused
from kvoffload_patch.control.listener import Listener

STATUS = {
    "pid": os.getpid(), "model": "m", "number": 3, "copies": "by hand", "state": "on", "reason": "",
    "since": 0.0, "seconds": 10.0, "seconds_since_step": 0.5, "growing": False,
    "block_bytes": 1 << 20, "load_ms_per_block": 0.5,
    "largest_blocks": 2048, "capacity_blocks": 1024, "used_blocks": 256,
    "loaded_blocks": 5, "stored_blocks": 6, "evicted_blocks": 7, "capacity_bytes": 1 << 30,
    "used_bytes": 1 << 28, "loaded_bytes": 5 << 20, "stored_bytes": 6 << 20,
    "evicted_bytes": 7 << 20, "queried_tokens": 200, "hit_tokens": 50,
    "dropped_blocks": {"no_room": 1, "overwritten": 2},
    "removed_blocks": {"reset": 4, "emptied": 0, "failed": 1},
    "failed_blocks": 3, "failed_copies": 2,
    "failed_by": {"load mismatch": 1, "store raised": 1}, "mismatches": 8,
    "parked_requests": 1, "queued_loads": 0, "queued_stores": 4,
    "settings": {"eviction": "arc", "load_mode": "auto"},
}  # fmt: skip


class Engine:
    """Answers as an engine, and notes what it is asked besides its status."""

    def __init__(self, **more: Any) -> None:
        self.asked: list[Command] = []
        self.more = more
        self.listener = Listener(self.answer)
        self.name = self.listener.name.removesuffix(".sock")

    def answer(self, command: Command) -> Mapping[str, Any]:
        if command.name != "status":
            self.asked.append(command)
        if command.name == "resize" and command.values["gib"] > 2:
            raise Refused("expected 2.00 GiB at most.")
        return {**STATUS, **self.more}


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("kvoffload_patch.control.folder.SHARED", tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def one() -> Iterator[Engine]:
    made = Engine(forgotten_blocks=9)
    yield made
    made.listener.close()


@pytest.fixture
def another(one: Engine) -> Iterator[Engine]:
    made = Engine(state="failed", reason="a fault")
    yield made
    made.listener.close()


def test_every_command_is_known_to_the_command_line_and_has_help(capsys: Any) -> None:
    assert set(engines._ABOUT) < set(main._OWN)
    for name in engines._ABOUT:
        with pytest.raises(SystemExit) as ended:
            main.main([name, "--help"])
        text = capsys.readouterr().out
        assert ended.value.code == 0 and f"example: kvoffload {name}" in text


def test_an_engine_in_a_folder_that_others_can_enter_is_not_said_to_be_missing(
    one: Engine, tmp_path: Path, capsys: Any
) -> None:
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    folder.chmod(0o777)
    for argv in (["empty"], ["top", "--once"]):
        assert main.main(argv) == 2
        line = capsys.readouterr().err
        assert f"expected {folder} to be open to user" in line and "set its mode to 700." in line
    main.main(["status"])
    assert f"\nengines:      expected {folder} to be open to user" in capsys.readouterr().out
    main.main(["status", "--json"])
    (said,) = json.loads(capsys.readouterr().out)["not_looked_into"]
    assert said == top.table([]) and said.startswith(f"expected {folder} to be open to user")
    folder.chmod(0o700)
    assert main.main(["empty"]) == 0


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["pause"], {}),
        (["resume"], {}),
        (["empty"], {}),
        (["resize", "1.5"], {"gib": 1.5}),
        (["set", "--eviction", "lru", "--max-stall-ms", "5"],
         {"eviction": "lru", "max_stall_ms": 5.0}),
    ],
)  # fmt: skip
def test_the_only_engine_is_asked(
    argv: list[str], values: dict[str, Any], one: Engine, capsys: Any
) -> None:
    assert main.main(argv) == 0
    assert [command[:2] for command in one.asked] == [(argv[0], values)]
    found = capsys.readouterr().out
    now = "; eviction arc, load_mode auto" if argv[0] == "set" else ""
    size = "0.25 of 1.00 GiB used (25%), 9 blocks forgotten"
    assert found == f"engine {one.name}: on, {size}{now}\n"


def test_several_are_asked_only_if_that_is_said(one: Engine, another: Engine, capsys: Any) -> None:
    assert main.main(["pause"]) == 2 and not one.asked
    assert "name one by --engine, or say --all." in capsys.readouterr().err
    assert main.main(["pause", "--engine", another.name]) == 0
    assert (len(one.asked), len(another.asked)) == (0, 1)
    assert main.main(["pause", "--engine", str(os.getpid())]) == 0
    assert main.main(["pause", "--all", "--json"]) == 0
    assert (len(one.asked), len(another.asked)) == (2, 3)
    found = json.loads(capsys.readouterr().out.partition("[")[2].join("[ "))
    assert {each["engine"] for each in found} == {one.name, another.name}
    assert main.main(["pause", "--engine", "7"]) == 2
    names = ", ".join(sorted((one.name, another.name)))
    assert f"--engine is '7', expected one of {names}; see" in capsys.readouterr().err


def test_a_name_and_all_of_them_are_refused_together(
    one: Engine, another: Engine, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["pause", "--engine", str(os.getpid()), "--all"])
    assert ended.value.code == 2 and not one.asked and not another.asked
    assert "expected --engine or --all, found both; give one" in capsys.readouterr().err


def test_where_none_runs_that_is_said(capsys: Any) -> None:
    assert main.main(["pause"]) == 2
    said = capsys.readouterr().err
    assert "expected a running engine of this user with a CPU tier, found none in " in said
    assert "its log says `no control socket` or it has KVOFFLOAD_CONTROL=0, or restart it" in said


def test_a_status_says_that_no_engine_runs(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.plain_servers, "found", lambda tiers: [])
    main.main(["status"])
    assert capsys.readouterr().out.endswith(
        "\nengines:      no running engine of this user has a CPU tier\n"
    )


def test_a_status_names_servers_without_a_tier(
    one: Engine, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(tiers: set[int]) -> list[dict[str, Any]]:
        assert tiers == {os.getpid()}
        return [{"process": 7, "command": "vllm serve m", "reason": "its log says why."}]

    monkeypatch.setattr(report.plain_servers, "found", found)
    main.main(["status"])
    assert (
        "\nengines:      process 7, `vllm serve m`, has no tier to be seen: its log says why.\n"
        f"engine {one.name}: on, " in capsys.readouterr().out
    )
    main.main(["status", "--json"])
    assert json.loads(capsys.readouterr().out)["without_tier"] == found({os.getpid()})


def test_a_change_of_settings_says_what_they_are_now(one: Engine, capsys: Any) -> None:
    one.more.update(store="auto", stores_lazily=True)
    assert main.main(["set", "--eviction", "arc"]) == 0
    assert capsys.readouterr().out == (
        f"engine {one.name}: on, 0.25 of 1.00 GiB used (25%), 9 blocks forgotten; "
        "eviction arc, load_mode auto, store auto (lazily now)\n"
    )


def test_an_engine_whose_folder_was_removed_is_not_found(one: Engine, capsys: Any) -> None:
    """As a logout does; it goes on, and nobody can ask it."""
    found = client.find()
    shutil.rmtree(found[0].path.parent)
    assert main.main(["empty"]) == 2
    assert "was removed, as a logout removes XDG_RUNTIME_DIR." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["set", "--eviction", "x", "--max-stall-ms", "1e300"],
         "--eviction is 'x'.*--max-stall-ms is '1e300'"),
        (["resize", "1e300"], "65536 at most, found '1e300'"),
        (["resize", "auto"], "found 'auto'"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_before_any_engine_is_asked(
    argv: list[str], why: str, one: Engine, capsys: Any
) -> None:
    assert main.main(argv) == 2 and not one.asked
    said = capsys.readouterr().err
    import re

    assert re.search(why, said) and "KVOFFLOAD_EVICTION" not in said, said


def test_nothing_to_set_is_refused_by_the_names_of_options(one: Engine, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["set"])
    assert ended.value.code == 2 and not one.asked
    assert "expected --load-mode or --eviction or " in capsys.readouterr().err


def test_programs_are_told_why_no_engine_is_asked(one: Engine, capsys: Any) -> None:
    assert main.main(["pause", "--engine", "7", "--json"]) == 2
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert shown.err == f"kvoffload_patch: {error}\n" and error.startswith("--engine is '7'")
    assert not one.asked


def test_what_an_engine_refuses_is_said_and_so_is_the_status(one: Engine, capsys: Any) -> None:
    assert main.main(["resize", "3"]) == 2
    assert f"{one.name}: expected 2.00 GiB at most." in capsys.readouterr().err
    assert main.main(["resize", "3", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == [
        {"engine": one.name, "error": "expected 2.00 GiB at most."}
    ]


def test_status_has_the_engines_that_run(one: Engine, another: Engine, capsys: Any) -> None:
    main.main(["status"])
    text = capsys.readouterr().out
    for line in (
        f"engine {one.name}: on, since ",
        f"engine {another.name}: failed (a fault), since ",
        "  size:      0.25 of 1.00 GiB used (25%); at most 2.00 GiB\n",
        "  hits:      50 of 200 tokens that the GPU lacked (25.0%)\n",
        "  blocks:    5 loaded, 6 stored, 7 evicted, 5 removed otherwise (4 reset, 1 failed), "
        "3 not stored (1 no_room, 2 overwritten)\n",
        "  speed:     2.1 GB/s when it started, on average 0.5 MB/s loaded, 0.6 MB/s stored since",
        "  failed:    2 copies of 3 blocks (1 load mismatch, 1 store raised); "
        "8 loads brought other bytes than were stored\n",
        "  under way: 0 loads, 4 stores, 1 requests parked; last step 0.5 s ago\n",
        "  settings:  eviction arc, load_mode auto\n",
    ):
        assert line in text
    main.main(["status", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert sorted(each["engine"] for each in found["engines"]) == sorted([one.name, another.name])


def test_an_engine_that_does_not_answer_is_a_status_of_its_own(
    one: Engine, another: Engine, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """As one that is stopped; a tier that has failed answers, and scripts see that in its state."""
    made, found = _bootstrap.status(), {"verdict": "ok"}
    monkeypatch.setattr(_bootstrap, "status", lambda: {**made, **found})
    assert main.main(["status"]) == 0
    monkeypatch.setattr(client, "STATUS_S", 0.05)
    over = threading.Event()
    monkeypatch.setattr(one.listener, "_answer", lambda command: {"late": over.wait(60)})
    assert main.main(["status"]) == 1
    assert f"engine {one.name}: expected engine {one.name} to answer" in capsys.readouterr().out
    assert main.main(["status", "--json"]) == 1
    found["verdict"] = "no vLLM"
    assert main.main(["status"]) == 2
    over.set()


def test_what_was_wrong_is_told_beside_what_was_compared() -> None:
    made = Engine(compared_loads=40)
    try:
        assert "; 8 loads of 40 compared brought other bytes" in engines.text(engines.status()[0])
    finally:
        made.listener.close()


def test_an_engine_of_another_version_hides_no_other(
    one: Engine, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """What its status lacks is said, and nothing else is asked of it."""
    for name in engines._NEEDED:
        other = {key: value for key, value in STATUS.items() if key != name}
        monkeypatch.setattr(one, "answer", lambda command, told=other: {"version": "0.0.9", **told})
        monkeypatch.setattr(one.listener, "_answer", one.answer)
        (found,) = engines.status()
        assert "of version 0.0.9 without " + name in engines.text(found)
        assert found["error"].endswith("restart the server with this one.")
        top.table([{**found, "rates": {}}])
        assert main.main(["pause"]) == 2 and name in capsys.readouterr().err
    assert one.asked == []


def test_what_is_shown_of_an_engine_is_needed_of_its_status() -> None:
    shown = {name: STATUS[name] for name in engines._NEEDED}
    engines.text({"engine": "1-a", **shown})
    top.table([{"engine": "1-a", "rates": top.rates(shown, {**shown, "seconds": 11.0}), **shown}])


def test_the_speed_of_a_device_that_does_not_tell_it_is_left_out(one: Engine) -> None:
    one.more["load_ms_per_block"] = 0.0
    (found,) = engines.status()
    assert "  speed:     on average 0.5 MB/s loaded" in engines.text(found)


def test_what_nobody_has_run_is_said(one: Engine) -> None:
    assert "unverified" not in engines.text(engines.status()[0])
    one.more["unverified"] = ["expected a GPU, found two", "expected one, found none"]
    lines = engines.text(engines.status()[0]).splitlines()
    assert lines[-2:] == [
        "  unverified: expected a GPU, found two", "  unverified: expected one, found none",
    ]  # fmt: skip


def test_adapters_that_the_tier_is_not_used_for_are_named(one: Engine) -> None:
    assert "left out" not in engines.text(engines.status()[0])  # as of an older engine
    one.more["stale_loras"] = []
    assert "left out" not in engines.text(engines.status()[0])
    one.more["stale_loras"] = ["sql", "tone"]
    why = "LoRA adapters that were loaded again, until the prefix cache is reset"
    assert f"  left out:  {why}: sql, tone" in engines.text(engines.status()[0])


def test_a_name_cannot_write_to_the_terminal(one: Engine, another: Engine, capsys: Any) -> None:
    """A model, an adapter and what an engine refuses can have any name."""
    name, seen = (
        "\x1b[31mred\x9b\u202e\r\nverdict: ok\x07",
        r"\x1b[31mred\x9b\u202e\r\nverdict: ok\x07",
    )
    one.more.update(model=name, stale_loras=[name], failed_by={name: 1})
    another.more.update(reason=name)
    for argv, times in ((["status"], 4), (["top", "--once", "--interval", "0.1"], 1),
                        (["pause", "--all"], 1)):  # fmt: skip
        main.main(argv)
        out = capsys.readouterr().out
        assert out.count(seen) == times and out.replace("\n", "").isprintable()


def test_an_engine_that_is_silent_is_named(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: Any) -> Any:
        raise Refused("expected a whole message")

    monkeypatch.setattr(engines.client, "ask", silent)
    (found,) = engines.status()
    assert engines.text(found) == f"engine {one.name}: expected a whole message"


def test_a_status_tells_a_step_that_hangs_from_an_idle_engine() -> None:
    for number, end in ((0, "last step 0.5 s ago"), (2, "last step 0.5 s ago, still under way")):
        lines = engines.text({**STATUS, "engine": "one", "steps_under_way": number}).splitlines()
        assert next(line for line in lines if "under way:" in line).endswith(end)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "load_mode auto"),
        ({"store": "eager", "stores_lazily": False}, "load_mode auto, store eager"),
        ({"store": "auto", "stores_lazily": True}, "store auto (lazily now)"),
        ({"store": "auto", "stores_lazily": False}, "store auto (as they are computed now)"),
        ({"store": "auto"}, "load_mode auto, store auto"),
        (
            {"gpu_share": 0.44, "settings": {"gpu_prefixes": "auto"}},
            "gpu_prefixes auto (the first 44% now)",
        ),
        ({"gpu_share": 1.0, "settings": {"gpu_prefixes": "auto"}}, "gpu_prefixes auto (whole now)"),
        ({"gpu_share": 1.0, "settings": {"gpu_prefixes": "whole"}}, "gpu_prefixes whole"),
        ({"integrity": "full", "compares": True}, "integrity full"),
        ({"integrity": "sample", "compares": True}, "integrity sample"),
        (
            {"integrity": "sample", "compares": False},
            "integrity sample (no load is compared now)",
        ),
        ({"integrity": "off", "compares": False}, "integrity off"),
    ],
)
def test_a_status_says_what_a_setting_does_now(told: dict[str, Any], said: str) -> None:
    lines = engines.text({**STATUS, "engine": "one", **told}).splitlines()
    assert next(line for line in lines if "settings:" in line).endswith(said)
