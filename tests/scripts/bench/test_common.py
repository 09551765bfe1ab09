"""What the benchmarks share."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.bench.common import write_json


def test_numbers_of_a_list_share_a_line_and_all_else_is_as_it_was(tmp_path: Path) -> None:
    document = {
        "at": [1.5, -2, 3e-05], "none": [], "text": "[\n 1,\n 2]", "of lists": [[1, 2], [3]],
        "mixed": [1, "2", None], "named": {"one": 1, "numbers": [0]},
    }  # fmt: skip
    file = tmp_path / "new" / "found.json"
    write_json(file, document)
    text = file.read_text()
    assert json.loads(text) == document
    assert ' "at": [1.5, -2, 3e-05],\n' in text and ' "numbers": [0]\n' in text
    assert [path.name for path in file.parent.iterdir()] == ["found.json"]


def test_without_a_file_nothing_is_written() -> None:
    write_json(None, {"one": object()})
